"""Reference quantizers and dequantizers against loops that decode bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core import ConfigError, GroupShape, Packing, QuantKey, ScaleDesc, TensorError
from moe_core.reference.quantization import (
    dequantize_tensor,
    dequantize_weight,
    fake_quantize,
    quantize_moe_weights,
    quantize_tensor,
    quantize_weight,
)
from moe_core.spec.numerics import (
    AMAX_FLOOR,
    FP4_E2M1,
    FP8_E4M3,
    FP8_E5M2,
    INT4,
    INT8,
    UINT4,
    UINT4B8,
    UINT8,
    UINT8B128,
    NumberKind,
    QuantDtype,
)
from moe_core.spec.quant_key import (
    NAMES,
    PACKED_4BIT,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt4StaticAsym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kMxfp4Dynamic,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp4Static,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
)
from moe_core.spec.roles import scale_shape
from torch import Tensor

GROUPS = [GroupShape(-1, -1), GroupShape(1, -1), GroupShape(1, 8), GroupShape(4, 8), GroupShape(16, -1)]
SCALES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
TYPES: list[tuple[QuantDtype, Packing | None]] = [
    (FP8_E4M3, None),
    (FP8_E5M2, None),
    (FP4_E2M1, PACKED_4BIT),
    (INT8, None),
    (INT4, None),
    (INT4, PACKED_4BIT),
    (UINT4B8, PACKED_4BIT),
    (UINT4B8, Packing(torch.int32, 8)),
    (UINT8B128, None),
    (UINT8B128, Packing(torch.int32, 4)),
]
ASYMMETRIC: list[tuple[QuantDtype, Packing | None]] = [
    (UINT4, PACKED_4BIT),
    (UINT4, Packing(torch.int32, 8)),
    (UINT8, None),
    (INT8, None),
    (UINT4B8, PACKED_4BIT),
]


def key_of(dtype: QuantDtype, packing: Packing | None, group: GroupShape, scale: torch.dtype, **more: bool) -> QuantKey:
    return QuantKey(dtype, ScaleDesc(scale, True, group), packing=packing, **more)


def float_value(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a sign-exponent-mantissa code."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    mantissa = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def element(q: Tensor, expert: int, row: int, col: int, key: QuantKey) -> float:
    """The value of one stored element before scale and zero point."""
    dtype, packing = key.dtype, key.packing
    if packing is None:
        word = int(q.view(torch.uint8)[expert, row, col])
    else:
        stored = int(q[expert, row, col // packing.values_per_word])
        word = stored >> (dtype.bits * (col % packing.values_per_word)) & (2**dtype.bits - 1)
    if dtype.kind is NumberKind.FLOAT:
        return float_value(word, *{"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}[dtype.name])
    if dtype.kind is NumberKind.INT:
        bits = dtype.bits if packing is not None else 8
        return float(word - 2**bits if word >= 2 ** (bits - 1) else word)
    return float(word - (dtype.offset if key.symmetric else 0))


def by_loops(q: Tensor, scale: Tensor, key: QuantKey, rows: int, cols: int, parts: int, zero_point: Tensor | None,
             g_idx: Tensor | None) -> Tensor:  # fmt: skip
    result = torch.empty(q.shape[0], rows, cols, dtype=torch.float64)
    group = key.group_shape
    part_rows = rows // parts
    for expert in range(q.shape[0]):
        for row in range(rows):
            part, within = divmod(row, part_rows)
            for col in range(cols):
                column = int(g_idx[expert, col]) if g_idx is not None else 0 if group.col == -1 else col // group.col
                if group.is_per_tensor:
                    at: tuple[int, ...] = (expert, part)
                else:
                    grid_rows = 1 if group.row == -1 else -(-part_rows // group.row)
                    at = (expert, part * grid_rows + (0 if group.row == -1 else within // group.row), column)
                factor = float(scale[at])
                if scale.dtype is torch.uint8:
                    factor = 2.0 ** (int(scale[at]) - 127)
                value = element(q, expert, row, col, key)
                result[expert, row, col] = (value - (0 if zero_point is None else float(zero_point[at]))) * factor
    return result


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "packing"), TYPES, ids=lambda v: getattr(v, "name", str(v)))
def test_dequantize_is_that_of_the_loops(
    dtype: QuantDtype, packing: Packing | None, group: GroupShape, scale: torch.dtype
) -> None:
    key = key_of(dtype, packing, group, scale)
    generator = torch.Generator().manual_seed(1)
    for parts, part_rows, cols in ((1, 5, 21), (2, 6, 24)):
        w = torch.randn(2, parts * part_rows, cols, generator=generator) * torch.rand(2, 1, cols, generator=generator)
        q, s, z, _ = quantize_weight(w, key, parts=parts)
        assert z is None
        assert tuple(s.shape) == scale_shape(key, 2, parts * part_rows, cols, parts)
        assert s.dtype is scale
        expected = by_loops(q, s, key, parts * part_rows, cols, parts, None, None)
        exact = dequantize_weight(q, s, key, parts=parts, cols=cols, dtype=torch.float64)
        assert torch.equal(exact, expected)
        single = dequantize_weight(q, s, key, parts=parts, cols=cols)
        assert single.dtype is torch.float32
        assert torch.equal(single, expected.float())
        assert torch.equal(
            dequantize_weight(q, s, key, parts=parts, cols=cols, dtype=torch.bfloat16), expected.float().bfloat16()
        )


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize(("dtype", "packing"), ASYMMETRIC, ids=lambda v: getattr(v, "name", str(v)))
def test_zero_points(dtype: QuantDtype, packing: Packing | None, group: GroupShape) -> None:
    key = key_of(dtype, packing, group, torch.float32, symmetric=False)
    w = torch.randn(2, 12, 21, generator=torch.Generator().manual_seed(2)) + 0.7
    q, s, z, _ = quantize_weight(w, key, parts=2)
    assert z is not None
    assert z.shape == s.shape
    expected = by_loops(q, s, key, 12, 21, 2, z, None)
    exact = dequantize_weight(q, s, key, parts=2, zero_point=z, cols=21, dtype=torch.float64)
    assert torch.equal(exact, expected)
    # half a step for the value and half for the zero point
    assert float((exact - w).abs().max()) <= 1.01 * float(s.max())


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_in_their_own_order(symmetric: bool) -> None:
    dtype = UINT4B8 if symmetric else UINT4
    key = key_of(dtype, PACKED_4BIT, GroupShape(1, 8), torch.bfloat16, symmetric=symmetric, permuted=True)
    generator = torch.Generator().manual_seed(3)
    # 21 columns: the last group has five
    g_idx = torch.stack([torch.randperm(21, generator=generator) // 8 for _ in range(2)]).int()
    w = torch.randn(2, 6, 21, generator=generator) * (1 + g_idx[:, None, :].float()) ** 3
    q, s, z, _ = quantize_weight(w, key, g_idx=g_idx)
    expected = by_loops(q, s, key, 6, 21, 1, z, g_idx)
    exact = dequantize_weight(q, s, key, zero_point=z, g_idx=g_idx, cols=21, dtype=torch.float64)
    assert torch.equal(exact, expected)
    step = s.double().gather(2, g_idx.long()[:, None, :].expand(2, 6, 21))
    assert ((exact - w).abs() <= 1.01 * step).all()


def test_groups_of_any_number_of_columns() -> None:
    key = key_of(UINT4, PACKED_4BIT, GroupShape(1, 8), torch.float32, symmetric=False, permuted=True)
    # a part of a row of five groups: one has no column here, one has most
    g_idx = torch.tensor([[4] * 10 + [0, 2, 0, 2, 4, 1, 0]]).int()
    w = torch.randn(1, 6, 17, generator=torch.Generator().manual_seed(3))
    q, s, z, _ = quantize_weight(w, key, g_idx=g_idx, groups=5)
    assert z is not None
    assert s.shape == z.shape == (1, 6, 5)
    exact = dequantize_weight(q, s, key, zero_point=z, g_idx=g_idx, cols=17, dtype=torch.float64)
    assert torch.equal(exact, by_loops(q, s, key, 6, 17, 1, z, g_idx))
    for group in (0, 1, 2, 4):
        own = w[:, :, g_idx[0] == group]
        width = own.amax(2).clamp_min(0) - own.amin(2).clamp_max(0)
        torch.testing.assert_close(s[:, :, group], width / 15)
    assert torch.equal(s[:, :, 3], torch.full((1, 6), AMAX_FLOOR) / 15)


@pytest.mark.parametrize("permuted", [False, True])
def test_weights_under_given_zero_points(permuted: bool) -> None:
    key = key_of(UINT4, PACKED_4BIT, GroupShape(1, 8), torch.float32, symmetric=False, permuted=permuted)
    g_idx = torch.arange(16).remainder(2).int()[None] if permuted else None
    w = torch.tensor([[[-9.0, -8, -7, -1, 0, 1, 6, 7] * 2]])
    zero_point = torch.tensor([[[8, 16]]], dtype=torch.uint8)
    found = quantize_weight(w, key, g_idx=g_idx, scale=torch.ones(1, 1, 2), zero_point=zero_point)
    values = dequantize_weight(*found[:2], key, zero_point=found.zero_point, g_idx=g_idx)
    groups = torch.arange(16) // 8 if g_idx is None else g_idx[0]
    assert torch.equal(values[..., groups == 0], w[..., groups == 0].clamp(-8, 7))
    assert torch.equal(values[..., groups == 1], w[..., groups == 1].clamp(-16, -1))
    assert found.zero_point is not None
    assert torch.equal(found.zero_point, zero_point)


def largest_of_groups(w: Tensor, group: GroupShape, parts: int) -> Tensor:
    """Of each element of ``w`` [E, rows, cols], the largest magnitude of its group; the last ones may be partial."""
    halves = w.abs().unflatten(1, (parts, -1))
    rows, cols = halves.shape[2:]
    row, col = rows if group.row == -1 else group.row, cols if group.col == -1 else group.col
    found = torch.empty_like(halves)
    for r in range(0, rows, row):
        for c in range(0, cols, col):
            block = halves[:, :, r : r + row, c : c + col]
            found[:, :, r : r + row, c : c + col] = block.amax(dim=(2, 3), keepdim=True)
    return found.flatten(1, 2)


@pytest.mark.parametrize("key", list(NAMES), ids=lambda key: NAMES[key])
def test_every_named_key_round_trips_within_half_a_step(key: QuantKey) -> None:
    w = torch.randn(2, 2 * 130, 200, generator=torch.Generator().manual_seed(4))
    q, s, z, _ = quantize_weight(w, key, parts=2)
    again = dequantize_weight(q, s, key, parts=2, zero_point=z, cols=200, dtype=torch.float64)
    # of a group's largest value: half a step of the last binade or of the integer grid, and a bf16 scale's rounding
    step = {"e4m3": 2.0**-4, "e2m1": 1 / 4, "int8": 1 / 254, "int4": 1 / 14, "uint4b8": 1 / 14, "uint4": 1 / 15,
            "uint8b128": 1 / 254, "uint8": 1 / 255}[key.dtype.name] + 2.0**-8  # fmt: skip
    if not key.symmetric:
        # a zero point is an integer, so that one end of the range may lie half a step beyond the codes
        step *= 2
    if key.scale.rounding != "up":
        # what such a scale cuts off: of up to 2**9 / 448 times the largest code, or 496 / 448
        step += {"down": 1 - 448 / 512, "even": 1 - 448 / 496}[key.scale.rounding]
    assert bool(((again - w).abs() <= step * largest_of_groups(w, key.group_shape, parts=2)).all())
    # what is already on the grid stays where it is
    q2, s2, z2, _ = quantize_weight(again, key, parts=2)
    twice = dequantize_weight(q2, s2, key, parts=2, zero_point=z2, cols=200, dtype=torch.float64)
    # zero points beside bf16 scales of 255 steps: the second scale may be a hair apart
    kept = 0.3 if key.symmetric or key.dtype.bits == 4 else 0.5
    assert float((twice - again).norm()) <= kept * float((again - w).norm())


def test_scale_is_amax_over_the_largest_value() -> None:
    w = torch.randn(1, 130, 260)
    w[0, 128:, 256:] = 0
    q, s, *_ = quantize_weight(w, kFp8Static128BlockSym)
    assert s.shape == (1, 2, 3)
    assert torch.equal(s[0, 0, 0], w[0, :128, :128].abs().max() / 448)
    assert torch.equal(s[0, 1, 2], torch.tensor(AMAX_FLOOR) / 448)  # a block of zeros
    assert float(q[0, :128, :128].float().abs().max()) == 448
    assert torch.equal(q[0, 5, 7].float(), (w[0, 5, 7] / s[0, 0, 0]).to(torch.float8_e4m3fn).float())


def test_gate_and_up_end_in_blocks_of_their_own() -> None:
    w = torch.ones(1, 2 * 192, 128)
    w[:, 192:] = 3.0
    _, s, *_ = quantize_weight(w, kFp8Static128BlockSym, parts=2)
    assert s.shape == (1, 4, 1)
    assert torch.equal(s.flatten(), torch.tensor([1.0, 1.0, 3.0, 3.0]) / 448)
    q, s, *_ = quantize_weight(w, kFp8StaticTensorSym, parts=2)
    assert s.shape == (1, 2)
    assert torch.equal(dequantize_weight(q, s, kFp8StaticTensorSym, parts=2), w)


def test_power_of_two_scales_round_up() -> None:
    largest = torch.tensor([448.0, 448.1, 447.0, 224.0, 1.0, 0.0]).view(6, 1, 1)
    x = largest * torch.tensor([1.0, -0.5] * 16)
    codes = quantize_weight(x, kMxfp8Static).scale.flatten() - 127
    # exact powers stay, what is above goes up, and nothing saturates
    wanted = [0, 1, 0, -1, math.ceil(math.log2(1 / 448)), math.ceil(math.log2(AMAX_FLOOR / 448))]
    assert codes.to(torch.int8).tolist() == wanted
    assert float(quantize_weight(x, kMxfp8Static).values.float().abs().max()) <= 448
    four = quantize_weight(torch.tensor([[[6.0] * 32], [[6.1] * 32]]), kMxfp4Static)
    assert four.scale.flatten().tolist() == [127, 128]


def test_other_roundings_of_powers_of_two() -> None:
    """ "down" and "even" of e2m1: the largest values saturate; "even" goes up from 1.75 times a power of two."""
    below = float(torch.nextafter(torch.tensor(7.0), torch.zeros(())))
    largest = torch.tensor([4.0, 6.0, 6.1, below, 7.0, 7.9, 8.0, 3.4e38, math.inf, math.nan]).view(-1, 1)
    x = largest * torch.tensor([-1.0, *[0.5] * 31])
    wanted = {
        kMxfp4Dynamic: [0, 0, 1, 1, 1, 1, 1, 126, 128, 128],
        kMxfp4DynamicEven: [0, 0, 0, 0, 1, 1, 1, 126, 128, 128],
        kMxfp4DynamicDown: [0, 0, 0, 0, 0, 0, 1, 125, 128, 128],
    }
    for key, exponents in wanted.items():
        found = quantize_tensor(x, key)
        assert [int(code) - 127 for code in found.scale.flatten()] == exponents, key
        values = dequantize_tensor(found, key)
        largest_value = torch.exp2(torch.tensor(exponents[:7]).float()) * 6
        assert bool((values[:7].abs().amax(dim=1) <= largest_value).all())
        assert values[4, 0] == (-6.0 if key == kMxfp4DynamicDown else -8.0)
    zeros = quantize_tensor(torch.zeros(1, 32), kMxfp4DynamicEven)
    assert not bool(dequantize_tensor(zeros, kMxfp4DynamicEven).any())
    with pytest.raises(ConfigError, match="e8m0"):
        quantize_tensor(x, kFp8DynamicTokenSym.with_rounding("down"))


def test_other_roundings_of_powers_of_two_with_e4m3() -> None:
    """Its largest value is 1.75 * 2**8, "even" goes up from 1.9375 times a power of two."""
    below = float(torch.nextafter(torch.tensor(496.0), torch.zeros(())))
    largest = torch.tensor([256.0, 448.0, 449.0, below, 496.0, 511.0, 512.0, 3.4e38, math.inf, math.nan]).view(-1, 1)
    x = largest * torch.tensor([-1.0, *[0.5] * 31])
    wanted = {
        kMxfp8Dynamic: [0, 0, 1, 1, 1, 1, 1, 120, 128, 128],
        kMxfp8DynamicEven: [0, 0, 0, 0, 1, 1, 1, 120, 128, 128],
        kMxfp8DynamicDown: [0, 0, 0, 0, 0, 0, 1, 119, 128, 128],
    }
    for key, exponents in wanted.items():
        found = quantize_tensor(x, key)
        assert [int(code) - 127 for code in found.scale.flatten()] == exponents, key
        values = dequantize_tensor(found, key)
        assert values[4, 0] == (-448.0 if key == kMxfp8DynamicDown else -512.0)
        assert values[1, 0] == -448.0


def test_ties_go_to_even() -> None:
    # with a largest value of 6 the scale is 1 and the grid is that of e2m1
    x = torch.zeros(1, 1, 32)
    x[0, 0, :10] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -5.0])
    again = dequantize_weight(*quantize_weight(x, kMxfp4Static)[:2], kMxfp4Static)
    assert again[0, 0, :10].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -1.0, -4.0]
    near = torch.nextafter(x, torch.full_like(x, 10.0))
    near[0, 0, 0] = 6.0
    above = dequantize_weight(*quantize_weight(near, kMxfp4Static)[:2], kMxfp4Static)
    assert above[0, 0, :8].tolist() == [6.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    eight = torch.tensor([[[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]])
    assert quantize_weight(eight, kInt8StaticChannelSym).values.flatten().tolist() == [127, 0, 2, 2, 0, -2]


def test_packing_order() -> None:
    w = torch.tensor([[[-8.0, -7.0, 0.0, 7.0]]])
    # the scale is 8 / 7 in bf16, so that codes are those of the rounded quotients
    q, s, *_ = quantize_weight(w * 7 / 8, kInt4Static.with_group(1, 4))
    codes = [int(q[0, 0, 0]) & 15, int(q[0, 0, 0]) >> 4, int(q[0, 0, 1]) & 15, int(q[0, 0, 1]) >> 4]
    assert codes == [1, 2, 8, 14]  # offset binary, even columns in the low four bits
    assert s.dtype is torch.bfloat16


def test_odd_columns_fill_the_last_word() -> None:
    w = torch.randn(2, 4, 7)
    q, s, z, _ = quantize_weight(w, kInt4StaticAsym)
    assert q.shape == (2, 4, 4)
    assert dequantize_weight(q, s, kInt4StaticAsym, zero_point=z, cols=7).shape == w.shape
    with pytest.raises(TensorError, match=r"\bq .*8 columns"):
        dequantize_weight(q, s, kInt4StaticAsym, zero_point=z, cols=5)


def test_rows_packed_in_words() -> None:
    key = key_of(UINT4B8, Packing(torch.int32, 8, axis="n"), GroupShape(1, -1), torch.float32)
    flat = key_of(UINT4B8, PACKED_4BIT, GroupShape(1, -1), torch.float32)
    w = torch.randn(2, 16, 6)
    q, s, *_ = quantize_weight(w, key)
    assert q.shape == (2, 2, 6)
    assert torch.equal(dequantize_weight(q, s, key), dequantize_weight(*quantize_weight(w, flat)[:2], flat))
    with pytest.raises(TensorError, match="12 rows"):
        quantize_weight(w[:, :12], key)


@pytest.mark.parametrize(
    "key", [kFp8Dynamic128Sym, kMxfp8Dynamic, kInt8DynamicTokenSym, kInt8DynamicTokenAsym], ids=str
)
def test_activations_are_weights_of_one_expert(key: QuantKey) -> None:
    x = torch.randn(5, 200, dtype=torch.bfloat16)
    x[3] = 0
    q, s, z, _ = quantize_tensor(x, key)
    w, ws, wz, _ = quantize_weight(x[None], key)
    assert torch.equal(q.view(torch.uint8), w[0].view(torch.uint8))
    assert torch.equal(s, ws[0])
    assert (z is None) == (wz is None) == key.symmetric
    if z is not None and wz is not None:
        assert torch.equal(z, wz[0])
    fake = fake_quantize(x.double(), key)
    assert fake.dtype is torch.float64
    assert torch.equal(fake, dequantize_tensor(quantize_tensor(x, key), key, dtype=torch.float64))
    assert not fake[3].any()
    assert fake_quantize(x[:0], key).shape == (0, 200)


def test_static_scales_saturate() -> None:
    x = torch.tensor([[1.0, -1000.0, 500.0, 0.1]])
    q, s, *_ = quantize_tensor(x, kFp8StaticTensorSym, scale=torch.tensor(1.0))
    assert q.float().tolist() == [[1.0, -448.0, 448.0, 0.1015625]]
    assert s.shape == (1,)
    with pytest.raises(TensorError, match=r"\bscale\b"):
        quantize_tensor(x, kFp8StaticTensorSym)


def test_narrow_scales_don_t_vanish() -> None:
    key = kInt4Static.with_scale_dtype(torch.float16)
    q, s, *_ = quantize_weight(torch.zeros(1, 2, 128), key)
    assert float(s.min()) > 0
    assert not dequantize_weight(q, s, key).any()


def test_canonical_weights_of_a_layer() -> None:
    w13, w2 = torch.randn(3, 2 * 40, 64), torch.randn(3, 64, 40)
    bias = torch.randn(3, 80)
    weights = quantize_moe_weights(
        w13, w2, gated=True, weight_key=kFp8Static128BlockE8M0Sym, activation_key=kFp8Dynamic128Sym, w13_bias=bias
    )
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None
    # 40 rows of gate, 40 of up: a block each, whose scale is the power of two that holds its largest value
    for scale, parts in ((weights.w13_scale, w13.unflatten(1, (2, 40))), (weights.w2_scale, w2[:, None])):
        largest = parts.abs().amax(dim=(2, 3)) / 448
        assert torch.equal(scale.flatten(1).float() - 127, largest.log2().ceil())
    again = dequantize_weight(weights.w13, weights.w13_scale, kFp8Static128BlockE8M0Sym, parts=2)
    assert bool(((again - w13).abs() <= w13.abs() * 2.0**-4 + 2.0**-9).all())
    assert weights.w13_bias is bias
    plain = quantize_moe_weights(w13, w2, gated=False, weight_key=None)
    assert plain.w13 is w13
    assert plain.w13_scale is None


@pytest.mark.parametrize("key", [kFp8StaticTensorSym, kFp8Static128BlockSym, kMxfp8Static, kInt8StaticChannelSym])
def test_weights_under_a_given_scale(key: QuantKey) -> None:
    w = torch.randn(2, 136, 200, generator=torch.Generator().manual_seed(3))
    own = quantize_weight(w, key, parts=2)
    again = quantize_weight(w, key, parts=2, scale=own.scale)
    assert torch.equal(again.values.view(torch.uint8), own.values.view(torch.uint8))
    doubled = own.scale + 1 if key.scale.dtype is torch.uint8 else own.scale * 2
    coarse = quantize_weight(w, key, parts=2, scale=doubled)
    assert torch.equal(coarse.scale, doubled)
    limit = 2.0 * dequantize_weight(own.values, own.scale, key, parts=2).abs().max() / key.dtype.max_value
    step = limit / 2 if key.dtype.kind is NumberKind.INT else w.abs() / 16 + limit * 2.0**-10
    assert bool(((dequantize_weight(*coarse[:2], key, parts=2) - w).abs() <= step * 1.001).all())
    with pytest.raises(TensorError, match=r"\bscale\b"):
        quantize_weight(w, key, parts=2, scale=own.scale[:1])
    with pytest.raises(ConfigError, match="zero_point"):
        quantize_weight(w, kInt4StaticAsym, scale=own.scale)
    with pytest.raises(ConfigError, match="zero_point"):
        quantize_weight(w, key, scale=own.scale, zero_point=own.scale)
    with pytest.raises(ConfigError, match="zero_point"):
        quantize_weight(w, key, zero_point=own.scale)


def test_what_does_not_fit_is_named() -> None:
    w = torch.randn(2, 6, 64)
    q, s, *_ = quantize_weight(w, kMxfp8Static)
    with pytest.raises(TensorError, match=r"\bscale .*\[2, 6, 1\]"):
        dequantize_weight(q, s[..., :1], kMxfp8Static)
    with pytest.raises(TensorError, match=r"\bq .*torch\.float32"):
        dequantize_weight(w, s, kMxfp8Static)
    with pytest.raises(TensorError, match="6 rows"):
        quantize_weight(w, kMxfp8Static, parts=4)
    with pytest.raises(TensorError, match="g_idx"):
        quantize_weight(w, kMxfp8Static, g_idx=torch.zeros(2, 64, dtype=torch.int32))
    with pytest.raises(TensorError, match="zero_point"):
        dequantize_weight(*quantize_weight(w, kInt4StaticAsym)[:2], kInt4StaticAsym)
    with pytest.raises(TensorError, match="scale2"):
        dequantize_weight(q, s, kMxfp8Static, scale2=s)
    with pytest.raises(ConfigError, match="scale2"):
        quantize_weight(w, kMxfp8Static, scale2=s)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES),
    st.sampled_from(GROUPS),
    st.sampled_from(SCALES),
    st.integers(1, 2),
    st.integers(0, 9),
    st.integers(0, 33),
    st.integers(0, 2**31),
    st.floats(-30, 30),
)
def test_any_shape_and_magnitude(
    kind: tuple[QuantDtype, Packing | None],
    group: GroupShape,
    scale: torch.dtype,
    parts: int,
    part_rows: int,
    cols: int,
    seed: int,
    magnitude: float,
) -> None:
    key = key_of(*kind, group, scale)
    w = torch.randn(2, parts * part_rows, cols, generator=torch.Generator().manual_seed(seed))
    if scale is torch.float16:
        magnitude = max(-8.0, min(magnitude, 8.0))
    w = w * 2.0**magnitude
    q, s, *_ = quantize_weight(w, key, parts=parts)
    assert tuple(s.shape) == scale_shape(key, 2, parts * part_rows, cols, parts)
    again = dequantize_weight(q, s, key, parts=parts, cols=cols, dtype=torch.float64)
    assert again.shape == w.shape
    # 1/4 of the largest value: half the widest gap of e2m1, with a power-of-two scale up to twice too large
    bound = (0.26 * 2 if scale is torch.uint8 else 0.26) * float(w.abs().max()) if w.numel() else 0.0
    if scale is torch.float16:
        # below its normal numbers a scale is off by up to half their distance, and the largest code by as much
        bound += 2.0**-25 * kind[0].max_value
    if w.numel():
        assert float((again - w).abs().max()) <= bound
