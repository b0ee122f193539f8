"""The whole layer with scales per channel, tensor and token, for launch plans that the rule may choose.

Against float64 over the same quantized weights.  The tolerance is that of `test_block_moe`; for the rounding of the
intermediate to bfloat16, 2^-9 at most, sqrt(2^-9 * 2^-3) = 2^-6 is added where the layer is not float32.
"""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.experts import scaled_mm as scaled_mm_experts
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.ops import sort
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.quant_key import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from moe_core.testing.data import make_weights
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts
from moe_kit.planned import layer_error

KINDS = {"token": kFp8DynamicTokenSym, "tensor": kFp8DynamicTensorSym, "static": kFp8StaticTensorSym}
BATCHED = FusedMoEActivationFormat.BATCHED


def plan_of(block_m, *, swap=False, tma=False, splits=(1, 1), down_m=None, down_n=128, group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, swap, tma, splits[0])
    down = TileConfig(down_m or block_m, down_n, 4, 2, group_m, swap, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {
    "few": plan_of(16, swap=True, tma=True),
    "split": plan_of(16, swap=True, splits=(2, 2)),
    "narrow": plan_of(32, down_n=64, down_m=16),
    "many": plan_of(64, group_m=2),
}


def error(kind, weight_key, plan, device, **given):
    return layer_error(TritonFp8Experts, plan, weight_key, KINDS[kind], device, **given)


TOLERANCE = 2 * 2**-6


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans(kind, plan, device):
    assert error(kind, kFp8StaticChannelSym, plan, device) < TOLERANCE


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", [PLANS["few"], PLANS["split"], PLANS["many"]], ids=["few", "split", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_at_once(kind, plan, device):
    """Sizes that are no multiples, biases, an expert map, misleading ids, float32, no gate, scales per tensor."""
    layer = {
        "num_experts": 5,
        "num_local_experts": 3,
        "hidden_size": 136,
        "intermediate_size": 132,
        "has_bias": True,
        "activation": MoEActivation.RELU2_NO_MUL,
        "dtype": torch.float32,
    }
    assert error(kind, kFp8StaticTensorSym, plan, device, tokens=6, routing="invalid", **layer) < 2**-6


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", [PLANS["few"], PLANS["many"]], ids=["few", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_batched(kind, plan, device):
    layer = {"activation_format": BATCHED, "has_bias": True}
    assert error(kind, kFp8StaticTensorSym, plan, device, tokens=18, top_k=1, **layer) < TOLERANCE


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", [PLANS["split"], PLANS["many"]], ids=["split", "many"])
@pytest.mark.parametrize("kind", KINDS)
def test_router_weight_on_input(kind, plan, device):
    layer = {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": True}
    assert error(kind, kFp8StaticChannelSym, plan, device, **layer) < TOLERANCE


@pytest.mark.parametrize("plan", [PLANS["few"], PLANS["many"]], ids=["few", "many"])
def test_one_scale_of_all_with_a_sort_of_two_launches(plan, device, monkeypatch):
    monkeypatch.setattr(sort, "_COUNT_PAIRS", 4)
    assert error("tensor", kFp8StaticTensorSym, plan, device) < TOLERANCE


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", [PLANS["few"], PLANS["split"]], ids=["few", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_quantized_while_it_is_loaded(kind, plan, device, monkeypatch):
    monkeypatch.setattr(scaled_mm_experts, "quantizes_while_loading", lambda capability: False)
    assert error(kind, kFp8StaticChannelSym, plan, device, routing="invalid") < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_specialized(kind, batched, gated, device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    config = TileConfig(128, 128, 4, 4, 8, warp_specialized=True)
    layer = {
        "hidden_size": 528,
        "intermediate_size": 400,
        "top_k": 1 if batched else 2,
        "has_bias": True,
        "activation": MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL,
    }
    if batched:
        layer["activation_format"] = BATCHED
    found = error(kind, kFp8StaticChannelSym, TilePlan(config, config), device, tokens=300, **layer)
    # the tensor cores keep about 13 bits of a running sum of up to 528 / 32 steps
    assert found < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens(kind, device):
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=32, intermediate_size=32)
    weights = make_weights(config, kFp8StaticTensorSym, KINDS[kind], seed=0).to(device)
    experts = TritonFp8Experts(config, weight_key=kFp8StaticTensorSym, activation_key=KINDS[kind])
    kernel = FusedMoEKernel(experts, experts.convert(weights), PrepareAndFinalizeNoParallel(config))
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    ids = torch.empty(0, 1, dtype=torch.int32, device=device)
    assert kernel.apply(x, topk_weights=ids.float(), topk_ids=ids).shape == (0, 32)
