"""Tiles of 8 rows, whose products take `mma.sync`: layers of odd sizes, in every layout of the scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import QuantKey, kInt4Static, kInt4StaticAsym
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_kit.planned import layer_error
from moe_wna16.experts.marlin import MarlinWNA16Experts

FEW, POINTERS = TileConfig(8, 128, 4, 3, 1, True, True), TileConfig(8, 128, 2, 2, 1, True)
PLANS = {
    "few": TilePlan(FEW, FEW, True),
    "pointers": TilePlan(POINTERS, POINTERS),
    "split": TilePlan(replace(POINTERS, split_k=2), replace(FEW, split_k=2)),
    "groups of 8": TilePlan(replace(FEW, group_m=8), replace(FEW, group_m=8, num_warps=8)),
    "pieces": TilePlan(replace(FEW, block_m=16), FEW),
    "pieces of gemm1": TilePlan(POINTERS, replace(FEW, block_m=32)),
}


def error(plan: str, key: QuantKey, device: torch.device, size: int = 128, **layer: object) -> float:
    return layer_error(MarlinWNA16Experts, PLANS[plan], key.with_group(1, size), None, device, **layer)  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", PLANS)
def test_plans(plan: str, device: torch.device) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 256}
    assert error(plan, kInt4Static, device, tokens=13, num_experts=3, **sizes) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize("key", [kInt4Static, kInt4StaticAsym], ids=["symmetric", "zero points"])
def test_scales(key: QuantKey, size: int, dtype: torch.dtype, device: torch.device) -> None:
    plan = "few" if dtype is torch.float16 else "pointers"
    assert error(plan, key, device, size, dtype=dtype, hidden_size=256, intermediate_size=128) < 0.01


@pytest.mark.parametrize("plan", ["few", "split", "pieces"])
def test_odd_sizes_and_experts_without_rows(plan: str, device: torch.device) -> None:
    sizes = {"num_experts": 9, "top_k": 2, "hidden_size": 320, "intermediate_size": 224}
    assert error(plan, kInt4Static, device, 32, tokens=4, routing="idle", **sizes) < 0.01
