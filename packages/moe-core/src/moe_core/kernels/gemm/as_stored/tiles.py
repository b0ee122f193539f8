"""Words and activations of a tile, and the column order in which they meet.

    weights       int32 words [E, rows, words] of P codes each, 8 of 4 bits or 4 of 8, low bits first
    activations   bfloat16, float16 or float32 [rows, K padded to whole steps], columns in the order of `arrange`

The values of a word are those that one thread of NVIDIA's tensor cores holds. To keep the weights unchanged, the
activations are written once in the column order that makes this so. Products are transposed (SWAP_AB): weights go from
registers into the tensor cores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.gemm.tiles.operands import load_values


@triton.jit
def arrange(tile, P: tl.constexpr, AXIS: tl.constexpr):
    """Put the columns (dimension AXIS) of a tile into the order of `in_order`; P = 0 keeps them."""
    if P == 0:
        return tile
    elif AXIS == 1:
        return in_order(tile, tile.shape[0], tile.shape[1] // P, P)
    else:
        return tl.trans(in_order(tl.trans(tile), tile.shape[1], tile.shape[0] // P, P))


@triton.jit
def in_order(numbers, N: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Values of words [N, W, P in the word's bit order] as [N, P W] in the order of `arrange`."""
    # [unit, thread, element of its pair, pair] to [unit, pair, thread, element of its pair]
    return numbers.reshape(N, W // 4, 4, 2, P // 2).permute(0, 1, 4, 2, 3).reshape(N, P * W)


@triton.jit
def open_blocks(a_args, rows, expert):
    """a_args = (values, scales, values' row stride, scales' row stride); one scale per step."""
    values, scales, stride, scale_stride = a_args
    return values + rows * stride, scales + rows * scale_stride


@triton.jit
def load_blocks(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K] and the rows' scales [BLOCK_M]."""
    # Load the scale before the tile: nothing waits for it until the MMA is done.
    scale = tl.load(state[1] + k)
    tile, _ = load_values(state, k, BLOCK_K)
    return tile, scale
