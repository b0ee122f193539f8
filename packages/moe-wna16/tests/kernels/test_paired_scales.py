"""16-bit scales in pairs beside the same ones in float32: the same bits of the output, by tiles and by vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import FusedMoEConfig, MoEWeights, QuantKey, kInt4Static, kInt8Static
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan, TileConfig, TilePlan
from moe_core.spec.device import DeviceInfo
from moe_core.spec.workspace import Workspace
from moe_core.testing.data import make_inputs, make_weights
from moe_kit.planned import with_gemv, with_plan
from moe_wna16.experts.marlin import MarlinWNA16Experts
from torch import Tensor

FEW, MANY = TileConfig(8, 128, 4, 3, 1, True, True), TileConfig(64, 128, 4, 2, 1, True)
VECTORS = GemvConfig(32, 128, 4)
#: tokens and experts: scales multiply sums, or numbers; k loops that start within a pair; vectors
WAYS: dict[str, tuple[int, type[GroupedExperts]]] = {
    "sums": (5, with_plan(MarlinWNA16Experts, TilePlan(FEW, replace(FEW, split_k=2)))),
    "numbers": (5, with_plan(MarlinWNA16Experts, TilePlan(MANY, replace(MANY, split_k=2)))),
    "vectors": (1, with_gemv(MarlinWNA16Experts, GemvPlan(VECTORS, VECTORS))),
}
#: x has three groups of 128 columns and five of 64, h five, nine, and 17 of 32: pairs without a second group
SIZES: dict[str, Any] = {"num_experts": 3, "top_k": 2, "hidden_size": 320, "intermediate_size": 528}


def output(way: str, weights: MoEWeights, config: FusedMoEConfig, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """The layer's, in poisoned memory, and the scales of its two matrices."""
    tokens, made = WAYS[way]
    target = DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm90")
    experts = made(config, weight_key=weights.weight_key, activation_key=None, device=target)
    inputs = make_inputs(config, tokens, seed=2)
    workspace = Workspace(device).take(experts.workspaces(tokens))
    for tensor in workspace.values():
        tensor.view(torch.uint8).fill_(0xFF)
    converted = experts.convert(weights.to(device))
    out = torch.full_like(inputs.x, float("nan"), device=device)
    routed = {"topk_weights": inputs.topk_weights.to(device), "topk_ids": inputs.topk_ids.to(device)}
    experts.apply(out, inputs.x.to(device), converted, workspace=workspace, **routed)
    return out.cpu(), list(converted.quant_config.weight_scales)


def check(
    way: str,
    key: QuantKey,
    device: torch.device,
    *,
    scale_dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    ordered: bool = False,
    **changes: Any,
) -> None:
    """``stored``: what scales are kept as, where not as ``scale_dtype``; ``ordered``: with an activation order."""
    config = FusedMoEConfig(**SIZES | changes)
    weights = make_weights(config, key.with_scale_dtype(scale_dtype), None, seed=1)
    if ordered:
        weights = permuted(weights, config)
    assert weights.weight_key is not None
    scales = [scale.float() for scale in weights.weight_scales]
    same = replace(
        weights,
        weight_key=weights.weight_key.with_scale_dtype(torch.float32),
        w13_scale=scales[0],
        w2_scale=scales[1],
    )
    found, kept = output(way, weights, config, device)
    expected, wide = output(way, same, config, device)
    assert [scale.dtype for scale in kept] == [stored or scale_dtype] * 2
    assert [scale.dtype for scale in wide] == [torch.float32] * 2
    assert bool(found.isfinite().all())
    assert bool(found.any())
    assert torch.equal(found, expected)


def permuted(weights: MoEWeights, config: FusedMoEConfig) -> MoEWeights:
    """The weights with columns in any order, of whole groups."""
    key = weights.weight_key
    assert key is not None
    generator = torch.Generator().manual_seed(3)

    def groups(columns: int) -> Tensor:
        order = torch.rand(config.local_experts, columns, generator=generator).argsort(dim=1)
        return (order // key.group_size).int()

    return replace(
        weights,
        weight_key=replace(key, permuted=True),
        w13_g_idx=groups(config.hidden_size),
        w2_g_idx=groups(config.intermediate_size),
    )


@pytest.mark.diagonal(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_int4(size: int, scale_dtype: torch.dtype, way: str, device: torch.device) -> None:
    check(way, kInt4Static.with_group(1, size), device, scale_dtype=scale_dtype)


@pytest.mark.diagonal(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [32, 64, 128])
def test_int8(size: int, way: str, device: torch.device) -> None:
    check(way, kInt8Static.with_group(1, size), device)


@pytest.mark.parametrize("way", WAYS)
def test_float16_layers_have_relative_scales(way: str, device: torch.device) -> None:
    check(way, kInt4Static, device, dtype=torch.float16)


def test_float16_scales_of_float16_layers_are_widened(device: torch.device) -> None:
    check("sums", kInt4Static, device, scale_dtype=torch.float16, stored=torch.float32, dtype=torch.float16)


@pytest.mark.parametrize("way", ["sums", "numbers"])
@pytest.mark.parametrize("size", [64, 128])
def test_activation_order(size: int, way: str, device: torch.device) -> None:
    check(way, kInt4Static.with_group(1, size), device, ordered=True)


@pytest.mark.parametrize("way", WAYS)
def test_odd_numbers_of_rows_without_gates(way: str, device: torch.device) -> None:
    check(way, kInt4Static, device, activation="relu2_no_mul", hidden_size=330, intermediate_size=270)
