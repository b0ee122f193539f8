"""int8 widened in registers: layers for plans of every kind.

Layers against float64 over the same weights.  The interpreter truncates to bfloat16, 2^-7 at most: of h, of each pair's
result and of the output; float16 has three bits more.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core.activation import MoEActivation
from moe_core.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.gemm.plan import TileConfig, TilePlan
from moe_core.kernel import FusedMoEKernel
from moe_core.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.quant_key import kInt8StaticChannelSym
from moe_core.reference import fused_moe_reference
from moe_core.testing.data import make_inputs, make_weights
from moe_core.workspace import Workspace, workspace_nbytes
from moe_int8.experts.triton_weight_only import TritonInt8WeightOnlyExperts

BATCHED = FusedMoEActivationFormat.BATCHED
TOLERANCE = {torch.bfloat16: 3 * 2**-7, torch.float16: 3 * 2**-10, torch.float32: 2**-20}


def plan_of(block_m, *, tma=False, splits=(1, 1), group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[0])
    down = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {"few": plan_of(16, tma=True), "split": plan_of(16, splits=(2, 2)), "many": plan_of(64, group_m=2)}


class OnePlan(TritonInt8WeightOnlyExperts):
    """The experts with a plan of the test's own."""

    chosen: TilePlan | None = None

    def plan(self, num_tokens, on_gpu=True):
        chosen = self.chosen.unsplit() if self.batched else self.chosen
        return replace(chosen, pdl=chosen.pdl and on_gpu)


def error(plan, device, *, tokens=5, seed=0, routing="uniform", **layer):
    """Relative error (Frobenius) of two calls over poisoned memory, which give the same."""
    config = FusedMoEConfig(**({"num_experts": 3, "top_k": 2, "hidden_size": 144, "intermediate_size": 144} | layer))
    weights = make_weights(config, kInt8StaticChannelSym, None, seed=seed)
    inputs = make_inputs(config, tokens, seed=seed + 1, routing=routing)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids, "expert_map": inputs.expert_map}
    expected = fused_moe_reference(inputs.x, weights, config, **routed)
    experts = OnePlan(config, weight_key=kInt8StaticChannelSym, activation_key=None)
    experts.chosen = plan
    movement = BatchedPrepareAndFinalize if config.activation_format is BATCHED else PrepareAndFinalizeNoParallel
    kernel = FusedMoEKernel(experts, experts.convert(weights.to(device)), movement(config))
    size = workspace_nbytes(kernel.workspaces(tokens))
    kernel.workspace = Workspace(device, torch.full((size,), 0xFF, dtype=torch.uint8, device=device))
    routed = {name: None if tensor is None else tensor.to(device) for name, tensor in routed.items()}
    # a row stride that is not the width
    x = torch.nn.functional.pad(inputs.x.to(device), (0, 3))[:, : config.hidden_size]
    found = [kernel.apply(x, **routed).cpu() for _ in range(2)]
    assert torch.equal(*found)
    assert torch.isfinite(found[0]).all()
    return float((found[0].double() - expected).norm() / expected.norm().clamp_min(1e-30))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_plans(dtype, plan, device):
    assert error(plan, device, dtype=dtype) < TOLERANCE[dtype]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_everything_at_once(plan, device):
    """Sizes that are no multiples, biases, an expert map, misleading ids, no gate."""
    layer = {
        "num_experts": 5,
        "num_local_experts": 3,
        "hidden_size": 136,
        "intermediate_size": 132,
        "has_bias": True,
        "activation": MoEActivation.RELU2_NO_MUL,
    }
    assert error(plan, device, tokens=6, routing="invalid", **layer) < TOLERANCE[torch.bfloat16]


def test_batched(device):
    layer = {"activation_format": BATCHED, "has_bias": True}
    assert error(PLANS["many"], device, tokens=18, top_k=1, **layer) < TOLERANCE[torch.bfloat16]
