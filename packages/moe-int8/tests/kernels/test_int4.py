"""int4 weights in bytes: sums are exact, and layers right for plans and groups of every kind.

The tolerance of layers is that of `test_rows`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.gemm.tiles.launch import Gemm, OperandA, Result, Routing, grouped_gemm
from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces
from moe_core.spec.quant_key import (
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
)
from moe_int8.experts.triton_w4a8 import TritonW4A8Int8Experts
from moe_int8.kernels import int4
from moe_int8.layout import pack_int4
from moe_kit.planned import layer_error

TOLERANCE = 2 * 2**-7 + 2**-8
KEYS = {-1: kInt4W4A8StaticChannelSym} | {g: kInt4W4A8StaticGroup128Sym.with_group(1, g) for g in (32, 64, 128)}


@pytest.mark.parametrize("swap", [False, True], ids=["rows", "columns"])
def test_sums_are_those_of_float64(swap, device):
    """16 times the sums, bit for bit, of the largest codes and all others, where the last step is not full."""
    generator = torch.Generator().manual_seed(0)
    experts, tokens, count, depth = 2, 7, 40, 4160
    x = torch.zeros(tokens, 4224, dtype=torch.int8)
    x[:, :depth] = torch.randint(-128, 128, (tokens, depth), generator=generator)
    w = torch.randint(-8, 8, (experts, count, depth), generator=generator).to(torch.int8)
    x[0, :depth], w[:, 0] = -128, -8
    ids = torch.randint(0, experts, (tokens, 1), generator=generator, dtype=torch.int32)
    exact = torch.einsum("mk,mnk->mn", x[:, :depth].double(), w[ids.flatten().long()].double())
    assert float(exact.abs().max()) * 16 > 2**24
    ids = ids.to(device)
    specs = sort_workspaces(tokens, experts, 16)
    order = sort_pairs(
        ids,
        experts,
        16,
        workspace={spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs},
    )
    functions = int4.functions_of(-1, zero_points=False)
    ones = torch.ones(experts, count, 1, device=device)
    sums = torch.full((tokens, count), -7, dtype=torch.int32, device=device)
    gemm = Gemm(
        TileConfig(16, 64, 4, 2, swap_ab=swap),
        functions.weight(pack_int4(w, 64).to(device), ones, None, count, depth),
        OperandA((x.to(device), ones, x.stride(0), 1, 0, None), "pair"),
        Result.of(sums),
        order,
        Routing(ids, None, experts),
    )
    without_scales = functions.tile._replace(scale_acc=None)
    grouped_gemm(replace(gemm, weight=replace(gemm.weight, functions=lambda config: without_scales)))
    assert torch.equal(sums.cpu().double(), exact * 16)


def plan_of(block_m, split=1):
    config = TileConfig(block_m, 128, 4, 2, swap_ab=True, tma=True, split_k=split)
    return TilePlan(config, config, pdl=True)


@pytest.mark.parametrize("plan", [plan_of(16), plan_of(16, 2), plan_of(64)], ids=["few", "split", "many"])
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero-points"])
@pytest.mark.parametrize("group", KEYS)
def test_plans(group, zero_points, plan, device):
    """Three groups to a row, which do not fill the last step where a step has two."""
    size = 3 * group if group > 0 else 200
    keys = KEYS[group], kInt8DynamicTokenAsym if zero_points else kInt8DynamicTokenSym
    layer = {"hidden_size": size, "intermediate_size": size, "has_bias": True}
    assert layer_error(TritonW4A8Int8Experts, plan, *keys, device, **layer) < TOLERANCE
