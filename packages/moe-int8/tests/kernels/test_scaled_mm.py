"""int8 rows: sums are exact, codes those of the reference quantizer, and whole layers right for plans of every kind.

Layers against float64 over the same quantized weights.  A difference d before the intermediate is quantized becomes an
error of about sqrt(d * step) behind it: d is at most 2^-8 where it is stored in bfloat16, a step 2^-7 of the row's
largest value: 2^-7 each for x and for h, and 2^-8 for the output.  Where all rows share a scale, the largest value is
that of hundreds of rows, up to twice a row's own: steps are as much wider.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.kernels.gemm.tiles.launch import Gemm, OperandA, Result, Routing, TileFunctions, grouped_gemm
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows
from moe_core.kernels.gemm.tiles.scaled_mm import (
    load_values,
    load_weights,
    multiply_codes,
    open_values,
    open_weights,
    quantize_static,
)
from moe_core.kernels.ops.sort import QuantizeRows, sort_pairs, sort_workspaces, whole_row
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.reference.quantization import quantize_tensor
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.activation import MoEActivation
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.spec.quant_key import (
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.spec.workspace import workspace_nbytes
from moe_core.testing.data import make_weights
from moe_int8.experts.triton import TritonInt8Experts
from moe_int8.kernels import scaled_mm
from moe_int8.layout import row_sums, scale_and_zero
from moe_kit.planned import layer_error, with_plan

KEYS = {
    "token": kInt8DynamicTokenSym,
    "tensor": kInt8DynamicTensorSym,
    "static": kInt8StaticTensorSym,
    "token-zero": kInt8DynamicTokenAsym,
    "static-zero": kInt8StaticTensorAsym,
}
BATCHED = FusedMoEActivationFormat.BATCHED
TOLERANCE = {kind: 2 * 2**-7 * (1 if kind.startswith("token") else 2) + 2**-8 for kind in KEYS}


def plan_of(block_m, *, swap=False, tma=False, splits=(1, 1), group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, swap, tma, splits[0])
    down = TileConfig(block_m, 128, 4, 2, group_m, swap, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {
    "few": plan_of(16, swap=True, tma=True),
    "split": plan_of(16, swap=True, splits=(2, 2)),
    "many": plan_of(64, group_m=2),
}


def codes(generator, *shape):
    """Of every value, the extremes often: sums come as close to the limit as they can."""
    drawn = torch.randint(-128, 128, shape, generator=generator)
    extreme = torch.randint(0, 2, shape, generator=generator) * 255 - 128
    return torch.where(torch.rand(shape, generator=generator) < 0.5, drawn, extreme).to(torch.int8)


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize("swap", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("split", [1, 4])
def test_sums_are_those_of_float64(split, swap, device):
    """The int32 sums of a product, bit for bit, also where they are beyond what float32 counts."""
    generator = torch.Generator().manual_seed(0)
    experts, tokens, count, depth = 2, 7, 48, 2112
    x, w = codes(generator, tokens, 2176), codes(generator, experts, count, depth)
    # one token and one channel of the largest sum that there can be, 128 * 128 * k
    x[0], w[:, 0] = -128, -128
    ids = torch.randint(0, experts, (tokens, 1), generator=generator, dtype=torch.int32)
    exact = torch.einsum("mk,mnk->mn", x[:, :depth].double(), w[ids.flatten().long()].double())
    assert float(exact.abs().max()) > 2**24
    x, w, ids = x.to(device), w.to(device), ids.to(device)
    specs = sort_workspaces(tokens, experts, 16)
    order = sort_pairs(
        ids,
        experts,
        16,
        workspace={spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs},
        positions=True,
    )
    sums = torch.full((tokens * split, count), -7, dtype=torch.int32, device=device)
    functions = TileFunctions(
        open_values, load_values, open_weights, load_weights, multiply_codes, accumulate=scaled_mm.INT8.tile.accumulate
    )
    ones = torch.ones(max(experts * count, tokens), device=device)
    scales = ones[: experts * count].view(experts, count, 1)
    gemm = Gemm(
        TileConfig(16, 64, 4, 2, swap_ab=swap, split_k=split),
        scaled_mm.INT8.weight(w, scales, None, count, w.shape[2]),
        OperandA((x, ones, x.stride(0), 1, 0, None), "pair"),
        Result.of(sums),
        order,
        Routing(ids, None, experts),
    )
    grouped_gemm(replace(gemm, weight=replace(gemm.weight, functions=lambda config: functions)))
    parts = sums.view(tokens, split, count).cpu().double()
    assert torch.equal(parts.sum(1), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero-points"])
def test_sums_of_the_specialized_kernel(zero_points, device):
    """Unit scales: the float32 result is the exact sum, rounded once."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's own")
    from moe_core.kernels.gemm.sm90.launch import hopper_gemm

    generator = torch.Generator().manual_seed(0)
    experts, pairs, count, depth = 3, 700, 400, 3216
    w = codes(generator, experts, count, depth)
    ids = torch.randint(0, experts, (pairs, 1), generator=generator, dtype=torch.int32)
    x = codes(generator, pairs, depth)
    zero = torch.randint(-128, 128, (pairs,), generator=generator, dtype=torch.int32)
    shifted = x.double() - zero[:, None] if zero_points else x.double()
    ids = ids.to(device)
    specs = sort_workspaces(pairs, experts, 128)
    order = sort_pairs(
        ids,
        experts,
        128,
        workspace={spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in specs},
    )
    sorted_pairs = order.pairs.long().cpu()
    exact = torch.empty(pairs, count, dtype=torch.float64)
    for expert in range(experts):
        own = (ids.cpu().flatten() == expert).nonzero().flatten()
        place = torch.isin(sorted_pairs, own).nonzero().flatten()
        exact[sorted_pairs[place]] = shifted[place] @ w[expert].double().T
    out = torch.full((pairs, count), float("nan"), device=device)
    a_scale = torch.ones(pairs, device=device)
    sums: tuple = ()
    if zero_points:
        a_scale = scale_and_zero(torch.ones(pairs), zero).to(device)
        sums = (row_sums(w).to(device), count)
    functions = scaled_mm.INT8_ZERO if zero_points else scaled_mm.INT8
    weight_scale = torch.ones(experts, count, 1, device=device)
    weight = functions.weight(w.to(device), weight_scale, None, count, depth, extra=sums)
    config = TileConfig(128, 128, 8, 3, 8, warp_specialized=True)
    a = OperandA((x.to(device),), "position", warp_specialized=(a_scale, 1, None))
    hopper_gemm(Gemm(config, weight, a, Result.of(out), order, Routing(ids, None, experts)))
    assert torch.equal(out.cpu(), exact.float())


# ------------------------------------------------------------------ codes


def hostile(rows_count=9, columns=100):
    x = torch.randn(rows_count, columns, generator=torch.Generator().manual_seed(3)) * 3
    x[0] = 0
    x[1] = x[1].abs() + 1  # all positive: the range includes 0
    x[2] = -x[2].abs()
    x[3] = torch.arange(columns) + 0.5  # ties
    x[4, 7], x[5, 8], x[6, 9] = float("nan"), float("inf"), -float("inf")
    x[7] *= 1e-12
    return x


@pytest.mark.parametrize("zero_points", [False, True], ids=["symmetric", "zero-points"])
def test_codes_are_those_of_the_reference(zero_points, device):
    x = hostile()
    expected = quantize_tensor(x, KEYS["token-zero" if zero_points else "token"])
    values = torch.empty(len(x), 128, dtype=torch.int8, device=device)
    scales = torch.empty(len(x), dtype=torch.int64 if zero_points else torch.float32, device=device)
    functions = scaled_mm.INT8_ZERO if zero_points else scaled_mm.INT8
    in_use = ("sorted", (torch.tensor([len(x)], dtype=torch.int32, device=device),))
    job = QuantizeRows(x.to(device), values, scales, functions.quantize_row, whole_row(128), (values,))
    quantize_rows(job, in_use, pdl=False)
    assert torch.equal(values.cpu()[:, : x.shape[1]], expected.values)
    scales = scales.cpu()
    if zero_points:
        assert torch.equal((scales >> 32).int()[:, None], expected.zero_point)
        scales = scales.int().view(torch.float32)
    assert torch.equal(scales.nan_to_num(-1.0), expected.scale.flatten().nan_to_num(-1.0))


@triton.jit
def static_kernel(x, packed, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, quantize: tl.constexpr):
    place = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    values, _ = quantize(tl.load(x + place), (out, packed), tl.program_id(0), 1)
    tl.store(out + place, values)


@pytest.mark.parametrize("zero", [None, 0, -128, 127, 31])
def test_static_codes_saturate(zero, device):
    x = torch.linspace(-400, 400, 16 * 128).view(16, 128)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    scale = torch.tensor([0.7])
    zero_point = None if zero is None else torch.tensor([zero], dtype=torch.int32)
    key = KEYS["static" if zero is None else "static-zero"]
    expected = quantize_tensor(x, key, scale=scale[0], zero_point=None if zero is None else zero_point[0]).values
    packed = scale if zero is None else scale_and_zero(scale, zero_point)
    out = torch.empty(16, 128, dtype=torch.int8, device=device)
    static_kernel[(1,)](x.to(device), packed.to(device), out, 16, 128, quantize_static)
    assert torch.equal(out.cpu(), expected)


# ------------------------------------------------------------------ layers


def error(kind, plan, device, **given):
    return layer_error(TritonInt8Experts, plan, kInt8StaticChannelSym, KEYS[kind], device, **given)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KEYS)
def test_plans(kind, plan, device):
    assert error(kind, plan, device) < TOLERANCE[kind]


@pytest.mark.parametrize("plan", [PLANS["few"], PLANS["many"]], ids=["few", "many"])
@pytest.mark.parametrize("kind", KEYS)
def test_everything_at_once(kind, plan, device):
    """Sizes that are no multiples, biases, an expert map, misleading ids, float32, no gate."""
    layer = {
        "num_experts": 5,
        "num_local_experts": 3,
        "hidden_size": 136,
        "intermediate_size": 132,
        "has_bias": True,
        "activation": MoEActivation.RELU2_NO_MUL,
        "dtype": torch.float32,
    }
    assert error(kind, plan, device, tokens=6, routing="invalid", **layer) < TOLERANCE[kind]


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("tokens", [65, 129])
@pytest.mark.parametrize("plan", [plan_of(16, swap=True, splits=(2, 1)), PLANS["many"]], ids=["split", "many"])
@pytest.mark.parametrize("kind", ["token", "tensor"])
def test_rows_whose_memory_gemm2_is_given(kind, plan, tokens, device):
    """More than 128 pairs for each expert: h before it is quantized lies where gemm2 writes."""
    assert error(kind, plan, device, tokens=tokens, num_experts=2, top_k=2, hidden_size=256) < TOLERANCE[kind]


@pytest.mark.parametrize("sizes", [(48, 144), (4096, 144), (48, 4096)], ids=str)
def test_fewer_tokens_never_need_more_memory(sizes):
    config = FusedMoEConfig(2, 2, *sizes)
    experts = TritonInt8Experts(config, weight_key=kInt8StaticChannelSym, activation_key=kInt8DynamicTokenSym)
    needed = [workspace_nbytes(experts.workspaces(tokens)) for tokens in range(1, 400)]
    assert needed == sorted(needed)


@pytest.mark.parametrize("kind", KEYS)
def test_batched(kind, device):
    layer = {"activation_format": BATCHED, "has_bias": True}
    assert error(kind, PLANS["few"], device, tokens=18, top_k=1, **layer) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", KEYS)
def test_router_weight_on_input(kind, device):
    layer = {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": True}
    assert error(kind, PLANS["split"], device, **layer) < TOLERANCE[kind]


def test_a_single_pair_keeps_its_nan(device):
    """One pair's magnitude is a row's, not one that others share: a NaN stays in it."""
    config = FusedMoEConfig(2, 1, 144, 144)
    weights = make_weights(config, kInt8StaticChannelSym, kInt8DynamicTokenSym, seed=3)
    split = with_plan(TritonInt8Experts, PLANS["split"])
    experts = split(config, weight_key=kInt8StaticChannelSym, activation_key=kInt8DynamicTokenSym)
    kernel = FusedMoEKernel(experts, experts.convert(weights.to(device)), PrepareAndFinalizeNoParallel(config))
    x = torch.ones(1, 144, dtype=config.dtype, device=device)
    x[0, 7] = float("nan")
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    assert kernel.apply(x, topk_weights=torch.ones(1, 1, device=device), topk_ids=ids).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", KEYS)
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
    assert error(kind, TilePlan(config, config), device, tokens=300, **layer) < TOLERANCE[kind]
