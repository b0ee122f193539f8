"""Loading, multiplying and scaling tiles of words, for the tile kernel's functions.

The same functions open and scale weights as stored (`moe_core.kernels.gemm.as_stored`).

    weights       int32 words [E, steps, rows, words of a step], see `moe_core.kernels.gemm.fragments.fragment_order`;
                  as stored [E, rows, words of K]
    scales        in four-byte words, so that they too are copied ahead of time: float32 [E, groups of K, rows];
                  with zero points int32: the bits of a float32 whose last nine are 0, and the zero point in their
                  place; or bfloat16 or float16 [E, groups / 2 rounded up, rows, 2]: two groups' scales of a row are
                  adjacent (`open_pairs`). As stored of any type [E, groups of K, rows].
    channel scales   float32 [E, rows] that multiply finished sums, or None
    activations   bfloat16, float16 or float32 [rows, K]

Operands are always swapped (SWAP_AB): weights go from registers into the tensor cores or, with float32 activations,
into float32 multiplications. Scales are applied

- to the finished sum, if there is one scale per row (`open_rows`, `scale_acc_rows`);
- to the sum of each step in float32, if a step is one group (`multiply_group`), which is exact and cheap for few
  tokens;
- otherwise to the values, rounded to the activations' dtype, at half an instruction more per value.

An element type is a function ``dequantize(words, scales, COLUMNS, dtype)``, for `multiply` and `multiply_group`. It
returns words [N, W] as values [N, COLUMNS] of `dtype`, or float32 in the interpreter, times their scales if those
belong to groups.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.prefetch import prefetch_l2
from moe_core.kernels.device.registers import both_halves, half_of, join_last, word_pointers
from moe_core.kernels.device.specialize import specialize
from moe_core.kernels.gemm.tiles.operands import step_strides, weight_rows, weight_tile
from moe_core.kernels.gemm.tiles.swap_ab import add_swap_ab_dot, swap_ab_dot

#: Columns of a step.
STEP = tl.constexpr(128)
# Constants that `specialize` sets: whether scales of two groups are adjacent, bits per code, scale groups per step
# (see `LOAD_WORDS`), whether `multiply_group` prefetches its scales, and the element type.
PAIRED = tl.constexpr(False)
BITS = tl.constexpr(4)
GROUPS = tl.constexpr(0)
SCALES_AHEAD = tl.constexpr(False)
dequantize: Any = None


@triton.jit
def open_groups(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """State of a tile.

    (pointers to its rows, mask of existing rows, their place for a descriptor (the first row, and `step_strides` of
    block-major words), pointers to the rows' scales, stride between groups, number of groups[, pointers to the rows'
    channel scales or zero points]).

    b_args: `moe_core.kernels.gemm.marlin.weight.PackedWeight`.
    """
    rows, inside, first = weight_rows(b_args.words, b_args.stride_e, b_args.stride_n, expert, half, n, N, BLOCK_N)
    place = (first,)
    if b_args.stride_k is not None:
        place += step_strides(b_args.stride_n, b_args.stride_k)
    columns = half * N + n + tl.arange(0, BLOCK_N)
    scales = word_pointers(b_args.scales) if PAIRED else b_args.scales
    scales = scales + expert.to(tl.int64) * b_args.scale_e + columns * b_args.scale_n
    if PAIRED:
        # The pointer type continues to state what the halves of a word are.
        scales = scales.to(b_args.scales.dtype)
    state = rows, inside, place, scales, b_args.scale_g, b_args.groups
    # A state must not contain None.
    if b_args.others is None:
        return state
    else:
        return state + (b_args.others + expert.to(tl.int64) * b_args.other_e + columns,)


#: `open_groups` for adjacent 16-bit scales of two groups: strides count words, and pairs take the place of groups.
open_pairs = specialize(open_groups, PAIRED=True)


@triton.jit
def open_rows(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """`open_groups` for rows with one scale each, which it loads."""
    state = open_groups(b_args, expert, half, n, N, BLOCK_N)
    return state[:3] + (tl.load(state[3], mask=state[1], other=0),) + state[4:]


@triton.jit
def tile_words(
    state, b_desc, k, K, BLOCK_K: tl.constexpr, BITS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr = True
):
    """int32 [BLOCK_N, words] of step k.

    Words beyond the last are 0 and meet zeros of the activations.
    """
    words = tl.cdiv(K * BITS, 32)
    strides = state[2][1:] if len(state[2]) > 1 else None
    return weight_tile(state[0], state[1], state[2][0], b_desc, k, words, BLOCK_K * BITS // 32, EVEN_N, EVEN_K, strides)


@triton.jit
def of_group(pointers, state, group, EVEN_N: tl.constexpr):
    """[BLOCK_N] of one group; `pointers` to those of the first; `state` of `open_groups`."""
    # The last step may have columns without a group, whose activations are zeros.
    pointers += tl.minimum(group, state[5] - 1) * state[4]
    if EVEN_N:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=state[1], other=0)


@triton.jit
def prefetch_group(pointers, state, group, EVEN_N: tl.constexpr):
    """Prefetch what `of_group` will load, where Triton cannot copy it ahead of time.

    That is the case for values of less than four bytes.
    """
    prefetch_l2(pointers + tl.minimum(group, state[5] - 1) * state[4], 1 if EVEN_N else state[1].to(tl.int32))


@triton.jit
def scales_in(loaded, k, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Scales of `dtype` of step k's GROUPS groups, from the words `loaded` for them.

    A word holds the 16-bit scales of two groups, and a step of one group takes one half of its word.
    """
    if dtype.primitive_bitwidth != 16:
        return loaded
    elif GROUPS == 1:
        return (half_of(loaded[0], k % 2, dtype),)
    else:
        found = ()
        for i in tl.static_range(len(loaded)):
            found += both_halves(loaded[i], dtype)
        return found


@triton.jit
def _scales_of_step(state, k, GROUPS: tl.constexpr, EVEN_N: tl.constexpr):
    """Scales [BLOCK_N] of each of step k's GROUPS groups.

    `state` of `open_groups` or `open_pairs`.
    """
    dtype: tl.constexpr = state[3].dtype.element_ty
    PER_WORD: tl.constexpr = 2 if dtype.primitive_bitwidth == 16 else 1
    pointers = word_pointers(state[3])
    loaded = ()
    COUNT: tl.constexpr = (GROUPS + PER_WORD - 1) // PER_WORD
    first = k // PER_WORD if GROUPS == 1 else k * COUNT
    for i in tl.static_range(COUNT):
        loaded += (of_group(pointers, state, first + i, EVEN_N),)
    return scales_in(loaded, k, GROUPS, dtype)


@triton.jit
def _load_words(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step and its scales."""
    if GROUPS == -1:
        scales = state[3]
    elif GROUPS == 0:
        scales = _scales_of_step(state, k, 1, EVEN_N)[0]
    else:
        scales = join_last(_scales_of_step(state, k, GROUPS, EVEN_N))
    return tile_words(state, b_desc, k, K, BLOCK_K, BITS, EVEN_N, EVEN_K), scales


#: load_b by bits of a code and groups of a step. Scales are [N, groups], or [N] for -1 (rows) and 0 (steps).
LOAD_WORDS = {
    (bits, groups): specialize(_load_words, BITS=bits, GROUPS=groups) for bits in (4, 8) for groups in (-1, 0, 1, 2, 4)
}


@triton.jit
def scale_of(scales):
    """float32 of loaded scales."""
    if scales.dtype == tl.int32:
        return (scales & -512).to(tl.float32, bitcast=True)
    else:
        return scales


@triton.jit
def zero_of(scales):
    """Zero points, float32, of loaded scales that contain them."""
    return (scales & 511).to(tl.float32)


@triton.jit
def per_word(groups, W: tl.constexpr, UNITS: tl.constexpr):
    """[N, G] values of a step's groups as [N, W] of its words.

    A step has UNITS units of 4 threads x 4 words. Joining and reshaping instead of indexing yields the layout of the
    tensor cores' operand, so that words need no detour through shared memory.
    """
    N: tl.constexpr = groups.shape[0]
    G: tl.constexpr = groups.shape[1]
    tl.static_assert(W == UNITS * 16)
    # Units with separate groups.
    U: tl.constexpr = UNITS if G >= UNITS else G
    by_unit = groups.reshape(N, U, G // U)[:, :, None, :, None]
    return tl.broadcast_to(by_unit, (N, U, 4 * UNITS // U, G // U, 4 * U // G)).reshape(N, W)


@triton.jit
def step_bytes(words):
    """[N, 4] of the bytes of `words` int32 [N]."""
    return join_last((words & 0xFF, (words >> 8) & 0xFF, (words >> 16) & 0xFF, (words >> 24) & 0xFF))


@triton.jit
def step_e8m0(words, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """Scales [N, 4] of a step's groups of 32 columns, from `words` int32 [N].

    A word has one byte for each group: LARGEST plus the exponent of a scale that is at most 1. The result is a pair of
    `dtype` values in int32. For bfloat16 the byte is the exponent field; float16 has it minus 224. For float32, and in
    the interpreter, the result is the scale.
    """
    return exponent_pair(step_bytes(words), LARGEST, dtype)


@triton.jit
def exponent_pair(exponents, LARGEST: tl.constexpr, dtype: tl.constexpr):
    """`step_e8m0` of single bytes."""
    if INTERPRET or dtype == tl.float32:
        return (exponents << 23).to(tl.float32, bitcast=True) * 2.0 ** (127 - LARGEST)
    elif dtype == tl.float16:
        # 2^(224 - LARGEST) times the largest, and less, becomes 0.
        return tl.maximum(exponents - 224, 0) * 0x04000400
    else:
        return exponents * 0x00800080


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + b @ a.T."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    return add_swap_ab_dot(acc, dequantize(b, b_scale, a.shape[1], a.dtype), a)


@triton.jit
def factor_of(scales, dtype: tl.constexpr):
    """Factor of `multiply_group`; replaced by `specialize` where values have another unit."""
    return scale_of(scales)


@triton.jit
def multiply_group(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + (b @ a.T) * scale of the step's only group."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    if SCALES_AHEAD and not INTERPRET:
        # Triton copies ahead of time only what products consist of. The scales become an input of the words, at
        # no instruction.
        bits = b_scale.to(tl.int32, bitcast=True)[:, None]
        b = tl.inline_asm_elementwise("", "=r,0,r", [b, bits], dtype=tl.int32, is_pure=True, pack=1)
    return acc + swap_ab_dot(dequantize(b, b_scale, a.shape[1], a.dtype), a) * factor_of(b_scale, a.dtype)[:, None]


@triton.jit
def scale_acc_rows(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc times the scale of each row."""
    return acc * scale_of(b_state[3])[:, None]


@triton.jit
def scale_acc_channels(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc times the factor of each row."""
    return acc * tl.load(b_state[6], mask=b_state[1], other=0.0)[:, None]


@triton.jit
def _scale_acc_tokens(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc times the scale of each activation row, then `scale_acc_rows` or another function."""
    # One after the other: the product of both may overflow or underflow where the result does not.
    return scale_acc_rows(acc * a_state[1][None, :], a_state, b_state, SWAP_AB)


#: scale_acc for activations with a scale per row, by the function for activations without.
SCALE_ACC_TOKENS = {
    function: specialize(_scale_acc_tokens, scale_acc_rows=function)
    for function in (scale_acc_rows, scale_acc_channels)
}
