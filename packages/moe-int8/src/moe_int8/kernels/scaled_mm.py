"""int8 with scales that do not change along k: what the layer of `moe_core.gemm.fused.scaled_mm` needs of an element
type.

Products of codes are summed over all of k in int32, which is exact: 128 * 128 * k stays below 2^31 up to k = 131071
(with zero points 255 * 128 * k up to 65793; `moe_int8.sums` refuses more).  Scales are applied to the finished sum;
where programs share a k loop, to the exact sum of each part, and parts are added in float32.

With zero points an activation is (q - z) s, and sum_k (q - z) w = sum_k q w - z sum_k w, in int32 as well: the sums of
the weights' rows are made when they are converted.  Scale and zero point of a row travel as one int64, so that
whatever moves a scale moves both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from moe_core.kernel_api import (
    ScaledMMFunctions,
    divide,
    divide_all,
    has_nan,
    is_finite,
    largest,
    load_scaled_rows,
    marked,
    open_unquantized_rows,
    open_weights,
    round_int8,
    scale_and_zero,
    scale_of,
    scale_of_parts,
    shifted,
    with_zero,
)

INT8_MAX = tl.constexpr(127.0)
# scale and zero point of a row that holds a NaN
_NAN_AND_ZERO = tl.constexpr(0x7FC00000)


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + a @ b.T, int32."""
    if SWAP_AB:
        return tl.dot(b, tl.trans(a), acc, out_dtype=tl.int32)
    else:
        return tl.dot(a, tl.trans(b), acc, out_dtype=tl.int32)


@triton.jit
def open_values(a_args, rows, expert):
    """a_args = (values, scales, values' row stride, scales' stride per row and per expert, marks of rows or None)."""
    values, scales, stride, scale_row, scale_expert, marks = a_args
    scale = tl.load(scales + rows * scale_row + expert * scale_expert)
    return values + rows * stride, marked(scale, marks, rows)


@triton.jit
def open_unquantized(a_args, rows, expert):
    """`open_unquantized_rows`."""
    return open_unquantized_rows(a_args, rows, expert, INT8_MAX)


@triton.jit
def load_and_quantize(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K], quantised in registers."""
    return round_int8(load_scaled_rows(state, k, BLOCK_K, False)), 0.0


@triton.jit
def load_and_quantize_static(state, k, BLOCK_K: tl.constexpr):
    """As `load_and_quantize`, by static scales."""
    return round_int8(load_scaled_rows(state, k, BLOCK_K, True)), 0.0


@triton.jit
def quantize_row(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile whose whole AXIS is a row: int8 codes and one float32 scale, amax / 127."""
    scale = scale_of(largest(tile, AXIS), INT8_MAX)
    return round_int8(divide(tile, tl.expand_dims(scale, AXIS))), scale


@triton.jit
def quantize_static(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile of one expert, by its own scale: quant_args = (scales [E] float32,)."""
    return round_int8(divide_all(tile, tl.load(quant_args[0] + expert))), 0.0


@triton.jit
def quantize_static_rows(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `quantize_static` for rows of several experts, `expert` [rows, 1]; their scales are kept."""
    scale = tl.load(quant_args[0] + expert)
    found = tl.where(has_nan(tile, AXIS), float("nan"), tl.max(scale, axis=1))
    return round_int8(divide_all(tile, scale)), found


@triton.jit
def quantize_by_amax(tile, quant_args, expert, AXIS: tl.constexpr):
    """By one scale for everything, Q as `scale_of_parts` takes it."""
    scale = scale_of_parts(quant_args, INT8_MAX)
    return round_int8(divide(tile, scale)), tl.where(is_finite(tile, AXIS), scale, float("nan"))


# ------------------------------------------------------------------ zero points


@triton.jit
def quantize_row_zero(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile whose whole AXIS is a row: scale = (max - min) / 255 and a zero point; the range includes 0."""
    low = tl.minimum(tl.min(tile, axis=AXIS), 0.0)
    width = tl.maximum(tl.max(tile, axis=AXIS), 0.0) - low
    scale = scale_of(width, 255.0)
    scale = tl.where(is_finite(tile, AXIS), scale, float("nan"))
    zero = -128.0 - tl.div_rn(low, scale)
    zero = tl.maximum(tl.minimum(tl.where(zero == zero, zero, 0.0), 127.0), -128.0)
    zero = (zero + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return shifted(tile, tl.expand_dims(scale, AXIS), tl.expand_dims(zero, AXIS)), with_zero(scale, zero)


@triton.jit
def quantize_static_zero(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile of one expert, by its own scale and zero point: quant_args = (`with_zero` [E],)."""
    scale, zero = scale_and_zero(tl.load(quant_args[0] + expert))
    return shifted(tile, scale, zero), 0.0


@triton.jit
def quantize_static_rows_zero(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `quantize_static_zero` for rows of several experts, `expert` [rows, 1]."""
    both = tl.load(quant_args[0] + expert)
    scale, zero = scale_and_zero(both)
    return shifted(tile, scale, zero), tl.where(has_nan(tile, AXIS), _NAN_AND_ZERO, tl.max(both, axis=1))


@triton.jit
def open_values_zero(a_args, rows, expert):
    """As `open_values`; A's scales are `with_zero`."""
    values, both, stride, scale_row, scale_expert, marks = a_args
    scale, zero = scale_and_zero(tl.load(both + rows * scale_row + expert * scale_expert))
    return values + rows * stride, marked(scale, marks, rows), zero


@triton.jit
def open_weights_sums(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """As `open_weights`; B ends with the sums of the weights' rows [E, rows] int32 and their expert stride."""
    weights, scales, stride_e, stride_n, scale_e, scale_half, scale_n, sums, sums_e = b_args
    state = open_weights(
        (weights, scales, stride_e, stride_n, scale_e, scale_half, scale_n), expert, half, n, N, BLOCK_N
    )
    columns = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    own = tl.load(sums + expert.to(tl.int64) * sums_e + half * N + columns)
    return state[0], state[1], state[2], state[3], own


@triton.jit
def scale_acc_zero(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """(acc - zero point * sum of the weights) * scale of the row * scale of the column."""
    a_scale, a_zero = a_state[1], a_state[2]
    b_scale, b_sum = b_state[2], b_state[4]
    if SWAP_AB:
        return (acc - a_zero[None, :] * b_sum[:, None]).to(tl.float32) * (a_scale[None, :] * b_scale[:, None])
    else:
        return (acc - a_zero[:, None] * b_sum[None, :]).to(tl.float32) * (a_scale[:, None] * b_scale[None, :])


# ------------------------------------------------------------------ as values


INT8 = ScaledMMFunctions(
    dtype=torch.int8,
    open_unquantized=open_unquantized,
    load_and_quantize=load_and_quantize,
    load_and_quantize_static=load_and_quantize_static,
    multiply=multiply,
    quantize_row=quantize_row,
    quantize_static=quantize_static,
    quantize_static_rows=quantize_static_rows,
    quantize_by_amax=quantize_by_amax,
    open_values=open_values,
    accumulate=tl.constexpr(tl.int32),
    marks=True,
)

#: activations with zero points: `ActivationScales` and scratch scales are `with_zero`, operands have `row_sums`
INT8_ZERO = ScaledMMFunctions(
    dtype=torch.int8,
    multiply=multiply,
    quantize_row=quantize_row_zero,
    quantize_static=quantize_static_zero,
    quantize_static_rows=quantize_static_rows_zero,
    open_values=open_values_zero,
    open_weights=open_weights_sums,
    scale_acc=scale_acc_zero,
    accumulate=tl.constexpr(tl.int32),
    marks=True,
)
