"""4-bit codes as the tile kernel's functions: of a symmetric type (code - 8), or with zero points."""

from __future__ import annotations

import triton
import triton.language as tl

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
from moe_core.gemm.marlin.widen import int4, int4_scaled, pair, uint4, uint4_scaled, zero_offset
from moe_core.gemm.narrow import INTERPRET


@triton.jit
def load_rows(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step, and the scales of rows that have one each."""
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), state[3]


@triton.jit
def load_group(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step that is one group, and its scales [BLOCK_N]."""
    scales = load_step(state, k, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_1(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """As `load_group`, scales [BLOCK_N, 1]."""
    scales = load_groups(state, k, 1, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_2(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step of two groups."""
    scales = load_groups(state, k, 2, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def load_groups_4(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step of four groups."""
    scales = load_groups(state, k, 4, EVEN_N)
    return tile_words(state, b_desc, k, K, BLOCK_K, 4, EVEN_N), scales


@triton.jit
def _numbers(words, scales, dtype: tl.constexpr):
    """Codes minus zero points, of scales [N]."""
    if scales.dtype == tl.int32:
        offset = zero_offset(zero_of(scales), 4, dtype)
        return uint4(words, tl.broadcast_to(offset[:, None], words.shape), dtype)
    else:
        return int4(words, dtype)


@triton.jit
def multiply_rows(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + b @ a.T, without scales."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return add_product(acc, _numbers(b, b_scale, a.dtype), a, acc.shape[1] <= FEW)


@triton.jit
def multiply_group(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (b @ a.T) * scale."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return add_scaled_product(acc, _numbers(b, b_scale, a.dtype), a, scale_of(b_scale))


@triton.jit
def multiply_groups(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (b * scale) @ a.T, the weights rounded to the activations' type."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    scale = scale_of(b_scale) if INTERPRET else pair(scale_of(b_scale), a.dtype)
    scale = per_word(scale, b.shape[1], 1)
    if b_scale.dtype == tl.int32:
        offset = per_word(zero_offset(zero_of(b_scale), 4, a.dtype), b.shape[1], 1)
        numbers = uint4_scaled(b, offset, scale, a.dtype)
    else:
        numbers = int4_scaled(b, scale, a.dtype)
    return add_product(acc, numbers, a, acc.shape[1] <= FEW)
