"""One-byte elements with scales that do not change along k, for the grouped GEMM.

    weights       [E, rows, K], one float32 scale per output row, or one per matrix (gate and up separately)
    activations   one float32 scale per row, per expert (static) or for all; or values that are quantized on load

Codes are int8 or e4m3. The outputs of `quantize_*` and `load_unquantized` have the dtype of their argument `codes`:
values of e4m3 may also be stored in 16 bits, for 16-bit MMAs. Scales are applied once, after the loop (`scale_acc`).
int8 is summed over all of k in int32. e4m3 is summed in the tensor cores within a step and in float32 across steps,
because Hopper's tensor cores keep fewer bits of a running sum.

With zero points, int8 codes stand for (code - zero point) * scale. Scale and zero point are packed into one int64
(`with_zero`), so that code that moves a scale moves both.

A token with non-finite values (dynamic scale), or with NaN (static scale), has a result of NaN. e4m3 codes represent
NaN, integer codes do not: there the row's scale becomes NaN. Where programs that see only part of a row quantize it
with a static scale, the row is flagged instead, and its reader replaces the scale by NaN (`scale_or_nan`).

Few rows are quantized on load (`load_unquantized`), because their tile is small compared with the weight tile. The
scale, which needs the whole row or tensor, is known by then: it is static, or derived from the magnitude that the
previous kernel stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import divide, divide_all, factor_e4m3, rounded, saturate
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.gemm.tiles.operands import load_values, step_strides, weight_rows, weight_tile
from moe_core.kernels.gemm.tiles.schedule import expert_of
from moe_core.kernels.gemm.tiles.swap_ab import as_column, as_row
from moe_core.kernels.ops._quantize_kernels import (
    AMAX_FLOOR,
    INFINITY_BITS,
    finite_bits,
    has_nan,
    is_finite,
    largest,
    largest_magnitude,
)

# Number of tiles that `_load_parts` splits a step into, set by `specialize`.
PARTS = tl.constexpr(1)
# Scale and zero point of a row that contains a NaN.
NAN_AND_ZERO = tl.constexpr(0x7FC00000)


@triton.jit
def scale_of(amax, MAX: tl.constexpr):
    """The scale for the largest magnitude `amax`, float32 or its bits in int32.

    NaN and infinity propagate.
    """
    if amax.dtype == tl.int32:
        amax = amax.to(tl.float32, bitcast=True)
    amax = tl.where(amax < AMAX_FLOOR, AMAX_FLOOR, amax)
    return tl.div_rn(amax, MAX)


@triton.jit
def scale_of_codes(amax, codes):
    """`scale_of` for `codes` of int8 or e4m3."""
    return scale_of(amax, 127.0 if codes.dtype.element_ty == tl.int8 else 448.0)


@triton.jit
def with_zero(scale, zero):
    """Pack a float32 scale (low half) and an int32 zero point (high half) into an int64."""
    return (zero.to(tl.int64) << 32) | (scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def scale_and_zero(both):
    """The inverse of `with_zero`."""
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32)


@triton.jit
def shifted(x, scale, zero):
    """Codes round(x / scale) + zero, saturating; NaN becomes 0."""
    quotient = divide_all(x, scale)
    x = tl.maximum(tl.minimum(tl.where(quotient == quotient, quotient, 0.0), 512.0), -512.0)
    # Round before adding the zero point, as integer hardware does.
    code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero
    code = tl.maximum(tl.minimum(code, 127), -128)
    return tl.where(quotient == quotient, code, 0).to(tl.int8)


@triton.jit
def by_static_scale(x, scale, codes):
    """Codes of float32 x by a static scale."""
    if scale.dtype == tl.int64:
        factor, zero = scale_and_zero(scale)
        return shifted(x, factor, zero)
    else:
        return saturate(divide_all(x, scale), codes)


@triton.jit
def scale_or_nan(scale, nan_flags, rows):
    """Scales of `rows`, replaced by NaN where `nan_flags` says so.

    nan_flags [rows] int32 holds bits of magnitudes, NaN for flagged rows; None flags nothing.
    """
    if nan_flags is None:
        return scale
    else:
        return tl.where(tl.load(nan_flags + rows) > INFINITY_BITS, float("nan"), scale)


# ------------------------------------------------------------------ activations


@triton.jit
def open_values(a_args, rows, expert):
    """(pointers to rows, scales[, zero points]).

    a_args = (values, scales, values' row stride, scales' stride per row and per expert, NaN flags of rows or None). For
    `load_unquantized`, values have a wider dtype, a_args end with K and codes, and scales may be magnitudes (bits,
    int32).
    """
    values, scales, stride, scale_row, scale_expert, nan_flags = a_args[:6]
    # Triton 3.6 cannot take the length of a tuple that contains None.
    rest = a_args[6:]
    scale = tl.load(scales + rows * scale_row + expert * scale_expert)
    if scale.dtype == tl.int64:
        scale, zero = scale_and_zero(scale)
        return values + rows * stride, scale_or_nan(scale, nan_flags, rows), zero
    elif len(rest) == 0:
        return values + rows * stride, scale_or_nan(scale, nan_flags, rows)
    else:
        if scale.dtype == tl.int32:
            scale = scale_of_codes(scale, rest[1])
        return values + rows * stride, scale_or_nan(scale, nan_flags, rows), rest[0], scales, rest[1]


@triton.jit
def _load_parts(state, k, BLOCK_K: tl.constexpr):
    """Tiles [BLOCK_M, BLOCK_K / PARTS] of the columns of a step, as `load_values`."""
    tiles = ()
    for i in tl.static_range(PARTS):
        tile, _ = load_values(state, PARTS * k + i, BLOCK_K // PARTS)
        tiles += (tile,)
    return tiles, 0.0


#: load_a device functions, keyed by the number of tiles per step.
LOAD_PARTS = {parts: specialize(_load_parts, PARTS=parts) for parts in (1, 2, 4)}


@triton.jit
def load_unquantized(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K], quantized in registers.

    Infinities become NaN; with static scales, the largest code.
    """
    values, scale, columns, scales, codes = state
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = tl.load(values[:, None] + column[None, :], mask=(column < columns)[None, :], other=0.0).to(tl.float32)
    if scales.dtype.element_ty == tl.int32:
        return saturate(divide(tile, scale[:, None]), codes), 0.0
    else:
        return saturate(divide_all(tile, scale[:, None]), codes), 0.0


@triton.jit
def quantize_row(tile, quant_args, expert, AXIS: tl.constexpr):
    """Quantize a tile whose whole AXIS is a row; quant_args = (codes,).

    Returns codes and one float32 scale, amax over the largest code.
    """
    codes = quant_args[0]
    scale = scale_of_codes(largest(tile, AXIS), codes)
    return rounded(divide(tile, tl.expand_dims(scale, AXIS)), codes), scale


#: `quantize_row` for groups of columns, which few threads share.
quantize_group = specialize(quantize_row, largest=largest_magnitude)


@triton.jit
def quantize_static(tile, quant_args, expert, AXIS: tl.constexpr):
    """Quantize a tile by its expert's scale; quant_args = (codes, scales [E]).

    For rows of several experts, `expert` [rows, 1], the scales are returned too.
    """
    scale = tl.load(quant_args[1] + expert)
    if len(scale.shape) == 0:
        return by_static_scale(tile, scale, quant_args[0]), 0.0
    else:
        found = tl.max(scale, axis=1)
        if scale.dtype == tl.int64:
            found = tl.where(has_nan(tile, AXIS), NAN_AND_ZERO, found)
        elif quant_args[0].dtype.element_ty == tl.int8:
            found = tl.where(has_nan(tile, AXIS), float("nan"), found)
        return by_static_scale(tile, scale, quant_args[0]), found


@triton.jit
def quantize_by_amax(tile, quant_args, expert, AXIS: tl.constexpr):
    """Quantize by one scale for all rows.

    quant_args = (codes, partial magnitudes [count] as int32 bits, count).
    """
    codes, amaxes, count = quant_args
    amax = tl.zeros((1024,), dtype=tl.int32)
    for start in range(0, count, 1024):
        index = start + tl.arange(0, 1024)
        amax = tl.maximum(amax, tl.load(amaxes + index, mask=index < count, other=0))
    scale = scale_of_codes(tl.max(amax, axis=0), codes)
    values = saturate(divide(tile, scale), codes)
    if codes.dtype.element_ty == tl.int8:
        return values, tl.where(is_finite(tile, AXIS), scale, float("nan"))
    else:
        return values, tl.zeros((tile.shape[1 - AXIS],), tl.float32) + scale


# ------------------------------------------------------------------ weights


@triton.jit
def open_weights(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """State of a weight tile.

    b_args = (weights, scales or None, weights' strides per expert, row and k-loop step, scales' strides per expert,
    half and row).
    """
    weights, scales, stride_e, stride_n, stride_k, scale_e, scale_half, scale_n = b_args
    rows, inside, first = weight_rows(weights, stride_e, stride_n, expert, half, n, N, BLOCK_N)
    scale = 0.0
    if scales is not None:
        columns = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
        scale = tl.load(scales + expert.to(tl.int64) * scale_e + half * scale_half + columns * scale_n)
    return rows, inside, scale, first, step_strides(stride_n, stride_k)


@triton.jit
def load_weights(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K]."""
    return weight_tile(state[0], state[1], state[3], b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K, state[4]), 0.0


@triton.jit
def multiply_codes(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + a @ b.T."""
    left, right = (b, tl.trans(a)) if SWAP_AB else (a, tl.trans(b))
    if acc.dtype == tl.int32:
        return tl.dot(left, right, acc, out_dtype=tl.int32)
    else:
        return acc + tl.dot(factor_e4m3(left), factor_e4m3(right), out_dtype=tl.float32)


@triton.jit
def scale_acc(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc * row scale * column scale, in float32."""
    return acc.to(tl.float32) * (as_column(a_state[1], SWAP_AB) * as_row(b_state[2], SWAP_AB))


@triton.jit
def scale_acc_tokens(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc * row scale."""
    return acc * as_column(a_state[1], SWAP_AB)


# ------------------------------------------------------------------ magnitudes


@triton.jit
def routed(row, inside, routing_args):
    """Mask of tokens that have a local expert.

    routing_args: `row_args` of "pairs" in `schedule.expert_of`.
    """
    top_k = routing_args[2]
    found = row < 0
    for slot in range(top_k):
        found = found | (expert_of(row * top_k + slot, inside, routing_args, "pairs") >= 0)
    return found


@triton.jit
def row_amax(tile, quant_args, token, AXIS: tl.constexpr):
    """Store the largest finite magnitude of each token (bits in int32) in place of its scale.

    Values are unchanged. The magnitude is 0 for tokens without a local expert. quant_args = (number of tokens,
    routing_args of `routed`, amax [1] that is raised as well, or None). If the number is None, rows of `tile` are of
    any kind, and all count.
    """
    tokens, routing_args, amax = quant_args
    bits = finite_bits(tile)
    if tokens is not None:
        bits = tl.where(routed(token, token < tokens, routing_args), bits, 0)
    found = tl.max(bits, axis=AXIS)
    if amax is not None:
        tl.atomic_max(amax, tl.max(found, axis=0), sem="relaxed")
    return tile, found


@triton.jit
def row_nan_flags(tile, quant_args, token, AXIS: tl.constexpr):
    """Store the input of `scale_or_nan` for each row in place of its scale; keep the values."""
    return tile, largest(tile, AXIS)
