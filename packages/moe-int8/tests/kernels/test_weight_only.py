"""int8 widened in registers: layers for plans of every kind.

Layers against float64 over the same weights.  Rounding to bfloat16 is 2^-8 at most: of h, of each pair's
result and of the output; float16 has three bits more.
"""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat
from moe_core.spec.quant_key import kInt8StaticChannelSym
from moe_int8.experts.triton_weight_only import TritonInt8WeightOnlyExperts
from moe_kit.planned import layer_error

BATCHED = FusedMoEActivationFormat.BATCHED
TOLERANCE = {torch.bfloat16: 3 * 2**-8, torch.float16: 3 * 2**-11, torch.float32: 2**-20}


def plan_of(block_m, *, tma=False, splits=(1, 1), group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[0])
    down = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {"few": plan_of(16, tma=True), "split": plan_of(16, splits=(2, 2)), "many": plan_of(64, group_m=2)}


def error(plan, device, **given):
    return layer_error(TritonInt8WeightOnlyExperts, plan, kInt8StaticChannelSym, None, device, **given)


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
