"""4- and 8-bit codes as the tile kernel's functions: of a symmetric type (code - 8, code - 128), or with zero points.

How many bits a code has is known from the words of a step: 16 for 128 columns, or 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.marlin.dequant import integers, pair, zero_offset
from moe_core.gemm.marlin.operand import (
    FEW,
    add_product,
    add_scaled_product,
    load_groups,
    load_step,
    per_word,
    scale_of,
    tile_words,
    zero_of,
)
from moe_core.jit.casts import INTERPRET


@triton.jit
def load_rows_4(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """4-bit words of a step, and the scales of rows that have one each."""
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), state[3]


@triton.jit
def load_group_4(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """4-bit words of a step that is one group, and its scales [BLOCK_N]."""
    scales = load_step(state, k, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_4_1(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """As `load_group_4`, scales [BLOCK_N, 1]."""
    scales = load_groups(state, k, 1, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_4_2(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """4-bit words of a step of two groups, and its scales."""
    scales = load_groups(state, k, 2, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_4_4(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """4-bit words of a step of four groups, and its scales."""
    scales = load_groups(state, k, 4, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_rows_8(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """8-bit words of a step, and the scales of rows that have one each."""
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), state[3]


@triton.jit
def load_group_8(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """8-bit words of a step that is one group, and its scales [BLOCK_N]."""
    scales = load_step(state, k, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), scales


@triton.jit
def load_groups_8_1(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """As `load_group_8`, scales [BLOCK_N, 1]."""
    scales = load_groups(state, k, 1, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), scales


@triton.jit
def load_groups_8_2(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """8-bit words of a step of two groups, and its scales."""
    scales = load_groups(state, k, 2, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), scales


@triton.jit
def load_groups_8_4(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """8-bit words of a step of four groups, and its scales."""
    scales = load_groups(state, k, 4, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 8, EVEN_N), scales


@triton.jit
def _numbers(words, scales, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points, of scales [N]."""
    if scales.dtype == tl.int32:
        offset = tl.broadcast_to(zero_offset(zero_of(scales), BITS, dtype)[:, None], words.shape)
        return integers(words, offset, None, BITS, dtype)
    else:
        return integers(words, None, None, BITS, dtype)


@triton.jit
def multiply_rows(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + b @ a.T, without scales."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    numbers = _numbers(b, b_scale, 32 * b.shape[1] // a.shape[1], a.dtype)
    return add_product(acc, numbers, a, acc.shape[1] <= FEW)


@triton.jit
def multiply_group(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + (b @ a.T) * scale."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    numbers = _numbers(b, b_scale, 32 * b.shape[1] // a.shape[1], a.dtype)
    return add_scaled_product(acc, numbers, a, scale_of(b_scale))


@triton.jit
def multiply_groups(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + (b * scale) @ a.T, the weights rounded to the activations' type."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    W: tl.constexpr = b.shape[1]
    BITS: tl.constexpr = 32 * W // a.shape[1]
    scale = scale_of(b_scale)
    if not INTERPRET and a.dtype != tl.float32:
        scale = pair(scale, a.dtype)
    scale = per_word(scale, W, W // 16)
    if b_scale.dtype == tl.int32:
        offset = per_word(zero_offset(zero_of(b_scale), BITS, a.dtype), W, W // 16)
        numbers = integers(b, offset, scale, BITS, a.dtype)
    else:
        numbers = integers(b, None, scale, BITS, a.dtype)
    return add_product(acc, numbers, a, acc.shape[1] <= FEW)
