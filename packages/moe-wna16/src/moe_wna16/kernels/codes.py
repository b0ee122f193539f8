"""Unsigned codes dequantized in registers: tile loads, products and scaling.

    weights       int32 words [E, rows, words], the checkpoint's bytes: 8 codes of 4 bits or 4 of 8, low bits first
    scales        [E, groups, rows] bfloat16, float16 or float32; zero points of that shape, uint8 or int16
    activations   bfloat16, float16 or float32 [rows, K padded], columns in the order of `arrange`

A code minus its zero point is an integer of at most 8 bits plus sign, which all these dtypes represent. Plain
operations compute it as in `moe_core.kernels.gemm.fragments.dequant`; `moe_core.kernels.gemm.as_stored.tiles` defines
the order of columns. A row's single scale multiplies the final sum, a group's scale the group's sum, both in float32.

With activation order, columns have individual scales. The product of code and scale is then split into a sum of two
numbers of the activations' dtype, which keeps what rounding to one of them would lose.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core import QuantKey
from moe_core.api.kernels import (
    INTERPRET,
    LOAD_PARTS,
    SCALE_ACC_TOKENS,
    TileFunctions,
    activation_functions,
    in_order,
    join_last,
    multiply,
    of_group,
    open_groups,
    open_rows,
    prefetch_group,
    scale_acc_rows,
    scale_acc_tokens,
    specialize,
    split_last,
    swap_ab_dot,
    tile_words,
    unpack,
    wait_for_mma,
)

# set by `specialize`: bits per code, groups per step
BITS = tl.constexpr(4)
GROUPS = tl.constexpr(1)

# ------------------------------------------------------------------ dequantization


@triton.jit
def _pair(words, zero, I: tl.constexpr, P: tl.constexpr, dtype: tl.constexpr):
    """Return [N, W, 2]: codes I and I + P / 2 of words [N, W] of P codes, minus `zero` [N, 1]."""
    BITS: tl.constexpr = 32 // P
    if BITS == 8 and dtype == tl.bfloat16:
        # 2^23 + code
        less = 8388608.0 + zero
        low = (((words >> (BITS * I)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - less
        high = (((words >> (BITS * I + 16)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - less
        return tl.join(low, high).to(dtype)
    else:
        # two 16-bit numbers in a word: 128 + code, or 1024 + code
        MASKS: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
        both = ((words >> (BITS * I)) & MASKS) | (0x64006400 if dtype == tl.float16 else 0x43004300)
        less = ((1024.0 if dtype == tl.float16 else 128.0) + zero).to(dtype)
        low = both.to(tl.int16).to(dtype, bitcast=True) - less
        return tl.join(low, (both >> 16).to(tl.int16).to(dtype, bitcast=True) - less)


@triton.jit
def dequantize_codes(words, zero, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Subtract zero points [N] from words' codes: [N, COLUMNS] in `arrange` order; exact."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    P: tl.constexpr = COLUMNS // W
    tl.static_assert(P == 4 or P == 8, "a word has 4 or 8 codes")
    zero = zero.to(tl.float32)[:, None]
    if INTERPRET or dtype == tl.float32:
        # Few operations, since each takes the interpreter a tenth of a millisecond.
        pairs = unpack(words, 32 // P).to(tl.float32) - zero[:, :, None]
    else:
        found = ()
        for i in tl.static_range(P // 2):
            found += (_pair(words, zero, i, P, dtype),)
        pairs = join_last(found)
    return in_order(pairs, N, W, P)


# ------------------------------------------------------------------ states and loads


@triton.jit
def open_zeros(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Open weights like `open_rows`, but load the rows' zero points."""
    state = open_rows(b_args, expert, half, n, N, BLOCK_N)
    if len(state) == 7:
        state = state[:6] + (tl.load(state[6], mask=state[1], other=0),)
    return state


@triton.jit
def open_columns(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Open weights like `open_groups`, with an additional pointer to the column groups."""
    state = open_groups(b_args, expert, half, n, N, BLOCK_N)
    return state + (b_args.column_groups + expert.to(tl.int64) * b_args.column_e,)


@triton.jit
def _load_codes(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a step's words and row zero points, or (scales, zero points); see `_LOAD_CODES`."""
    MIDDLE: tl.constexpr = 2.0 ** (BITS - 1)
    if GROUPS <= 0:
        words = tile_words(state, b_desc, k, K, BLOCK_K, BITS, EVEN_N, EVEN_K)
    if GROUPS == 0:
        return words, (state[6] if len(state) == 7 else tl.full((words.shape[0],), MIDDLE, tl.float32))
    elif GROUPS == -1:
        group = tl.load(state[-1] + k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :] * state[4]
        exists = state[1][:, None]
        scale = tl.load(state[3][:, None] + group, mask=exists, other=0.0)
        return words, (scale, tl.load(state[6][:, None] + group, mask=exists, other=0) if len(state) == 8 else MIDDLE)
    else:
        # loaded before the tile: nothing waits for them until the words arrive
        scales = ()
        for i in tl.static_range(GROUPS):
            scale = of_group(state[3], state, GROUPS * k + i, EVEN_N)
            zero = tl.full(scale.shape, MIDDLE, tl.float32)
            if len(state) == 7:
                zero = of_group(state[6], state, GROUPS * k + i, EVEN_N)
            scales += ((scale, zero),)
        words = tile_words(state, b_desc, k, K, BLOCK_K, BITS, EVEN_N, EVEN_K)
        for i in tl.static_range(GROUPS):
            prefetch_group(state[3], state, GROUPS * (k + 1) + i, EVEN_N)
            if len(state) == 7:
                prefetch_group(state[6], state, GROUPS * (k + 1) + i, EVEN_N)
        return words, scales


# ------------------------------------------------------------------ products and scales


@triton.jit
def multiply_groups(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Add to acc each group's ((codes - zero points) @ a.T) * scales."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    GROUPS: tl.constexpr = len(b_scale)
    # each thread holds words of every group, so no data moves between threads
    words = split_last(b.reshape(b.shape[0], GROUPS, b.shape[1] // GROUPS).permute(0, 2, 1))
    for i in tl.static_range(GROUPS):
        values = dequantize_codes(words[i], b_scale[i][1], a[i].shape[1], a[i].dtype)
        acc += swap_ab_dot(values, a[i]) * b_scale[i][0].to(tl.float32)[:, None]
    return acc


@triton.jit
def multiply_columns(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + ((codes - zero points) * scales) @ a.T."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    scale, zero = b_scale
    codes = dequantize_codes(b, tl.zeros((b.shape[0],), tl.float32), a.shape[1], tl.float32)
    values = (codes - zero) * scale.to(tl.float32)
    if INTERPRET or a.dtype == tl.float32:
        return acc + swap_ab_dot(values, a)
    else:
        high = values.to(a.dtype)
        low = (values - high.to(tl.float32)).to(a.dtype)
        return wait_for_mma(acc + swap_ab_dot(high, a) + swap_ab_dot(low, a))


#: load_b by bits per code and groups per step, [BLOCK_N] each; 0: one scale per row; -1: columns have individual
#: groups, [BLOCK_N, BLOCK_K]
_LOAD_CODES = {
    (bits, groups): specialize(_load_codes, BITS=bits, GROUPS=groups) for bits in (4, 8) for groups in (-1, 0, 1, 2, 4)
}
_MULTIPLY_ROWS = specialize(multiply, dequantize=dequantize_codes)


def code_functions(key: QuantKey | None, bits: int, groups: int) -> TileFunctions:
    """Build the tile functions for a kind of activations and groups.

    Args:
        key: None for 16-bit activations, or e4m3 with a scale per token (4-bit codes).
        bits: bits per code.
        groups: groups per mainloop step, 1, 2 or 4; 0 for one scale per row; -1 for columns with individual groups.

    Returns:
        The device functions of a tile.
    """
    open_a, load_a = activation_functions(key)
    load_b, scale_acc = _LOAD_CODES[bits, groups], None if key is None else scale_acc_tokens
    if groups == -1:
        return TileFunctions(open_a, load_a, open_columns, load_b, multiply_columns, scale_acc)
    if groups == 0:
        scale_acc = scale_acc_rows if key is None else SCALE_ACC_TOKENS[scale_acc_rows]
        return TileFunctions(open_a, load_a, open_zeros, load_b, _MULTIPLY_ROWS, scale_acc)
    return TileFunctions(open_a, LOAD_PARTS[groups], open_groups, load_b, multiply_groups, scale_acc)
