"""int8 with scales that are constant along K, and activations with zero points.

Products of codes are accumulated over all of K in int32, which is exact: 128 * 128 * K stays below 2^31 up to
K = 131071 (with zero points 255 * 128 * K up to 65793; `moe_int8.sums` refuses more). Scales are applied to the final
sum. With split-K they are applied to the exact sum of each split, and splits are added in float32.

With zero points an activation is (q - z) s, and sum_k (q - z) w = sum_k q w - z sum_k w, also in int32. The row sums of
the weights are computed at conversion.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from moe_core.api.kernels import (
    E4M3,
    ScaledMMFunctions,
    as_column,
    as_row,
    is_finite,
    open_weights,
    round_int8,
    scale_acc,
    scale_of,
    shifted,
    with_zero,
)


@triton.jit
def quantize_row_zero(tile, quant_args, expert, AXIS: tl.constexpr):
    """Quantize rows that span the whole AXIS with zero points: scale = (max - min) / 255.

    The range includes 0.
    """
    low = tl.minimum(tl.min(tile, axis=AXIS), 0.0)
    width = tl.maximum(tl.max(tile, axis=AXIS), 0.0) - low
    scale = scale_of(width, 255.0)
    scale = tl.where(is_finite(tile, AXIS), scale, float("nan"))
    zero = round_int8(-128.0 - tl.div_rn(low, scale)).to(tl.int32)
    return shifted(tile, tl.expand_dims(scale, AXIS), tl.expand_dims(zero, AXIS)), with_zero(scale, zero)


@triton.jit
def open_sums(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Open weights with `open_weights` (or its specialization) and append the row sums.

    b_args ends with the row sums of the weights [E, rows], int32 or float32, and their expert stride.
    """
    state = open_weights(b_args[:8], expert, half, n, N, BLOCK_N)
    columns = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    return state + (tl.load(b_args[8] + expert.to(tl.int64) * b_args[9] + half * N + columns),)


@triton.jit
def scale_acc_zero(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """Scale acc - zero point * row sum with `scale_acc` (or its specialization).

    acc and the row sums have the same dtype.
    """
    shifts = as_column(a_state[2].to(acc.dtype), SWAP_AB) * as_row(b_state[-1], SWAP_AB)
    return scale_acc(acc - shifts, a_state, b_state, SWAP_AB)


# ------------------------------------------------------------------ function tables


INT8 = ScaledMMFunctions(torch.int8, E4M3.tile._replace(accumulate=tl.constexpr(tl.int32)), flags_nan=True)

#: activations with zero points: `ActivationScales` and scratch scales are `with_zero`, operands include `row_sums`
INT8_ZERO = replace(
    INT8,
    tile=INT8.tile._replace(open_b=open_sums, scale_acc=scale_acc_zero),
    load_unquantized=None,
    quantize_row=quantize_row_zero,
)
