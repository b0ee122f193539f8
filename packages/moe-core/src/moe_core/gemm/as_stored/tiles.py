"""Words and activations of a tile, and the order of columns in which they meet.

    weights       int32 words [E, rows, words] of P codes each, 8 of 4 bits or 4 of 8, low bits first
    activations   bfloat16, float16 or float32 [rows, K padded to whole steps], columns in the order of `arrange`

The numbers of a word are those that one thread of NVIDIA's tensor cores holds; the activations are written once in the
order of columns that makes it so, so that the weights stay as they are.  Products are transposed (SWAP_AB): weights go
from registers into the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.scaled_mm import load_values
from moe_core.gemm.weight_tile import weight_rows, weight_tile


@triton.jit
def arrange(tile, P: tl.constexpr, AXIS: tl.constexpr):
    """Order the columns (dimension AXIS) of a tile as `in_order` has those of the weights; P 0: leave them."""
    if P == 0:
        return tile
    elif AXIS == 1:
        return in_order(tile, tile.shape[0], tile.shape[1] // P, P)
    else:
        return tl.trans(in_order(tl.trans(tile), tile.shape[1], tile.shape[0] // P, P))


@triton.jit
def in_order(numbers, N: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Numbers of words [N, W, P numbers in the order of the word's bits] as [N, P W] in the order of `arrange`."""
    # [unit, thread, of its pair, pair] to [unit, pair, thread, of its pair]
    return numbers.reshape(N, W // 4, 4, 2, P // 2).permute(0, 1, 4, 2, 3).reshape(N, P * W)


@triton.jit
def open_codes(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """State of a tile, of b_args as `moe_core.gemm.as_stored.scheme.packed_weight` makes them.

    Pointers to the tile's rows, which of them exist, the first, words of a row; pointers to the rows' scales, stride of
    a group's, number of groups; a pointer to the groups of columns; if there are any, pointers to the rows' `others`.
    """
    words, scales, others, columns = b_args[:4]
    stride_e, stride_n, row_words, scale_e, scale_g, scale_n, groups, other_e, column_e = b_args[4:]
    rows, inside, first = weight_rows(words, stride_e, stride_n, expert, half, n, N, BLOCK_N)
    base = expert.to(tl.int64)
    row = half * N + tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    # a state holds no None
    column = words if columns is None else columns + base * column_e
    state = rows, inside, first, row_words, scales + base * scale_e + row * scale_n, scale_g, groups, column
    if others is None:
        return state
    else:
        return state + (others + base * other_e + row,)


@triton.jit
def load_words(state, b_desc, k, W: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """[BLOCK_N, W] of step k; beyond the last word 0, which meets zeros of the activations."""
    return weight_tile(state[0], state[1], state[2], b_desc, k, state[3], W, EVEN_N, EVEN_K)


@triton.jit
def scale_acc_codes(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """acc * factor of the weights' row, the first behind the groups of columns in the state of `open_codes`."""
    return acc * b_state[8][:, None]


@triton.jit
def scale_acc_codes_tokens(acc, a_state, b_state, SWAP_AB: tl.constexpr):
    """`scale_acc_codes` * scale of the activations' row."""
    # one after the other: the product of both may be too large or too small where the result is not
    return acc * a_state[1][None, :] * b_state[8][:, None]


@triton.jit
def open_blocks(a_args, rows, expert):
    """a_args = (values, scales, values' row stride, scales' row stride), a scale for each step."""
    values, scales, stride, scale_stride = a_args
    return values + rows * stride, scales + rows * scale_stride


@triton.jit
def load_blocks(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K] and the rows' scales [BLOCK_M]."""
    # before the tile: nothing waits for the scale until the product is done
    scale = tl.load(state[1] + k)
    tile, _ = load_values(state, k, BLOCK_K)
    return tile, scale
