"""Layers of e4m3 words: launch parameters that the kit's small layers do not reach, what the batched format needs."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEActivationFormat, FusedMoEConfig, MoEWeights, QuantKey, TensorError
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.spec.device import DeviceInfo
from moe_core.spec.quant_key import kFp8Static128BlockSym, kFp8StaticChannelSym, kMxfp8Dynamic, kMxfp8Static
from moe_core.testing.cases import Case
from moe_core.testing.checks import check_values
from moe_core.testing.harness import Place
from moe_fp8.experts.marlin import MarlinFp8Experts
from moe_fp8.experts.triton_mxfp8 import TritonMxfp8Experts
from moe_kit.planned import with_plan

PLANS = {
    "split": (TileConfig(16, 128, 4, 2, 1, True, True, 2), TileConfig(16, 128, 4, 2, 1, True, True, 4)),
    "split up": (TileConfig(16, 128, 4, 2, 1, True, False, 4), TileConfig(16, 128, 4, 2, 1, True)),
    "pieces": (TileConfig(64, 128, 8, 2, 8, True, True), TileConfig(16, 128, 4, 2, 1, True)),
}


@pytest.mark.parametrize(
    ("plan", "weight_key", "activation_key"),
    [
        ("split", kFp8StaticChannelSym, None),
        ("split", kMxfp8Static, kMxfp8Dynamic),
        ("split up", kFp8Static128BlockSym, None),
        ("pieces", kMxfp8Static, kMxfp8Dynamic),
    ],
    ids=str,
)
def test_plans(plan: str, weight_key: QuantKey, activation_key: QuantKey | None, device: torch.device) -> None:
    base = MarlinFp8Experts if activation_key is None else TritonMxfp8Experts
    experts = with_plan(base, TilePlan(*PLANS[plan], pdl=True))
    config = FusedMoEConfig(num_experts=2, top_k=2, hidden_size=512, intermediate_size=256, has_bias=True)
    target = DeviceInfo.current() if device.type == "cuda" else DeviceInfo.parse("sm90")
    check_values(experts, Case("values", config, weight_key, activation_key, tokens=3), Place(device, target))


def test_the_batched_format_needs_counts() -> None:
    config = FusedMoEConfig(
        num_experts=2,
        top_k=1,
        hidden_size=32,
        intermediate_size=32,
        activation_format=FusedMoEActivationFormat.BATCHED,
        max_num_tokens=4,
    )
    experts = TritonMxfp8Experts(
        config, weight_key=kMxfp8Static, activation_key=kMxfp8Dynamic, device=DeviceInfo.parse("sm90")
    )
    weights = experts.convert(
        MoEWeights(
            weight_key=kMxfp8Static,
            activation_key=kMxfp8Dynamic,
            w13=torch.zeros(2, 64, 32).to(torch.float8_e4m3fn),
            w2=torch.zeros(2, 32, 32).to(torch.float8_e4m3fn),
            w13_scale=torch.full((2, 64, 1), 127, dtype=torch.uint8),
            w2_scale=torch.full((2, 32, 1), 127, dtype=torch.uint8),
        )
    )
    with pytest.raises(TensorError, match="expert_tokens"):
        experts.apply(
            torch.empty(2, 4, 32),
            torch.zeros(2, 4, 32),
            weights,
            topk_weights=torch.ones(4, 1),
            topk_ids=torch.zeros(4, 1, dtype=torch.int32),
            workspace={},
        )
