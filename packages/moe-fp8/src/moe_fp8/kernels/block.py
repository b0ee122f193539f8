"""Block FP8 as the grouped GEMM sees it: how a tile is loaded and scaled.

    weights       e4m3 [E, rows, K], or block-major, one float32 scale per block_n x block_k
    activations   e4m3 [M, K padded to whole groups], one float32 scale per row and group of block_k columns

BLOCK_K of the kernel equals block_k, so that each step of its loop meets one scale per row (`open_blocks`,
`load_blocks` of core) and one per weight block: the step's product is summed in the tensor cores and added, scaled, in
float32.

This file is the model for another scheme: write these functions and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.kernel_api import (
    as_column,
    as_row,
    factor_e4m3,
    scale_product,
    step_strides,
    weight_rows,
    weight_tile,
)


@triton.jit
def open_weights(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Pointers to the scales of a tile: a scalar within one row of scale blocks, [BLOCK_N] where it spans several.

    b_args = (weights, scales, weights' strides per expert, row and step of the k loop, scales' expert and row stride,
    block_n, a constant); columns of both are contiguous.  The up half starts at row N of the weights and at row
    ceil(N / block_n) of the scales.
    """
    weights, scales, stride_e, stride_n, stride_k, scale_e, scale_n, _ = b_args
    BLOCK: tl.constexpr = b_args[7]
    rows, inside, first = weight_rows(weights, stride_e, stride_n, expert, half, n, N, BLOCK_N)
    if BLOCK % BLOCK_N == 0:
        row = n // BLOCK
    else:
        row = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1) // BLOCK
    scale = scales + expert.to(tl.int64) * scale_e + (row + half * tl.cdiv(N, BLOCK)) * scale_n
    return rows, inside, scale, first, step_strides(stride_n, stride_k)


@triton.jit
def load_weights(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K] and its scale, a scalar or [BLOCK_N].

    b_desc: a tensor descriptor over the weights, or None for pointers.
    """
    rows, inside, scales, first, strides = state
    scale = tl.load(scales + k)
    return weight_tile(rows, inside, first, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K, strides), scale


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + (a @ b.T) * scales; a_scale [BLOCK_M], b_scale a scalar or [BLOCK_N]."""
    ONE: tl.constexpr = len(b_scale.shape) == 0
    if ONE:
        a_scale = scale_product(a_scale, b_scale)
    a, b = factor_e4m3(a), factor_e4m3(b)
    left, right = (b, tl.trans(a)) if SWAP_AB else (a, tl.trans(b))
    product = tl.dot(left, right, out_dtype=tl.float32) * as_column(a_scale, SWAP_AB)
    if not ONE:
        product *= as_row(b_scale, SWAP_AB)
    return acc + product
