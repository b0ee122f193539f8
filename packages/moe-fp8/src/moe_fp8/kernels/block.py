"""Block FP8 for the grouped GEMM: tile loading, scaling, and the fused-layer interface.

    weights       e4m3 [E, rows, K], or block-major, one float32 scale per block_n x block_k
    activations   e4m3 [M, K padded to whole groups], one float32 scale per row and group of block_k columns

The kernel's BLOCK_K equals block_k, so each mainloop step uses one scale per row (`open_blocks`, `load_blocks` of
moe-core) and one per weight block. The step's partial sum is accumulated in the tensor cores, then scaled and added in
float32.

Use this file as the template for another scheme: these functions are all it needs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from moe_core.api.experts import TileConfig
from moe_core.api.kernels import (
    GemmWeight,
    GroupScheme,
    TileFunctions,
    WarpSpecializedGemm,
    as_column,
    as_row,
    factor_e4m3,
    load_blocks,
    open_blocks,
    quantize_group,
    scale_product,
    step_strides,
    weight_rows,
    weight_strides,
    weight_tile,
)
from torch import Tensor


@triton.jit
def open_weights(b_args, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Return pointers to a tile's weights and scales.

    The scale pointer is a scalar if the tile stays within one row of scale blocks, else [BLOCK_N]. b_args = (weights,
    scales, weight strides per expert, row and mainloop step, scale strides per expert and row, block_n as a constant);
    columns of both are contiguous. The up half starts at row N of the weights and at row ceil(N / block_n) of the
    scales.
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
    """Load a tile [BLOCK_N, BLOCK_K] and its scale, a scalar or [BLOCK_N].

    b_desc is a tensor descriptor of the weights, or None to use pointers.
    """
    rows, inside, scales, first, strides = state
    scale = tl.load(scales + k)
    return weight_tile(rows, inside, first, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K, strides), scale


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """Compute acc + (a @ b.T) * scales; a_scale is [BLOCK_M], b_scale a scalar or [BLOCK_N]."""
    ONE: tl.constexpr = len(b_scale.shape) == 0
    if ONE:
        a_scale = scale_product(a_scale, b_scale)
    a, b = factor_e4m3(a), factor_e4m3(b)
    left, right = (b, tl.trans(a)) if SWAP_AB else (a, tl.trans(b))
    product = tl.dot(left, right, out_dtype=tl.float32) * as_column(a_scale, SWAP_AB)
    if not ONE:
        product *= as_row(b_scale, SWAP_AB)
    return acc + product


_TILE = TileFunctions(open_blocks, load_blocks, open_weights, load_weights, multiply)
#: weight blocks that the warp-specialized kernel supports
HOPPER_BLOCKS = ((128, 128), (64, 128), (128, 64), (64, 64))


def block_scheme(block_k: int) -> GroupScheme:
    """Describe e4m3 activations with one float32 scale per row and ``block_k`` columns.

    Args:
        block_k: columns per scale.

    Returns:
        The scheme for the fused layer.
    """
    return GroupScheme(
        quantize_group,
        torch.float8_e4m3fn,
        block_k,
        block=block_k,
        scale_dtype=torch.float32,
        scatters=True,
    )


def block_weight(
    weights: Tensor, scales: Tensor, bias: Tensor | None, rows: int, block_shape: tuple[int, int]
) -> GemmWeight:
    """Describe e4m3 weights with block scales for the grouped GEMM.

    Args:
        weights: [E, rows of all halves, K], or block-major.
        scales: float32 [E, halves * ceil(rows / block_n), ceil(K / block_k)]; gate and up each have a separate partial
            last
            row of blocks.
        bias: bias of the layer, or None.
        rows: rows of one half.
        block_shape: (block_n, block_k), powers of two of at least 32 and 16.

    Returns:
        The operand for the grouped GEMM.
    """
    block_n, block_k = block_shape
    strides = scales.stride(0), scales.stride(1), tl.constexpr(block_n)
    warp_specialized = None
    if block_shape in HOPPER_BLOCKS:
        warp_specialized = WarpSpecializedGemm(weights, _functions, (scales, *strides), block_k)
    return GemmWeight(
        (weights, scales, *weight_strides(weights, block_k), *strides),
        rows,
        weights.shape[1] * weights.shape[3] if weights.dim() == 4 else weights.shape[2],
        lambda config: _TILE,
        block_k,
        bias,
        warp_specialized=warp_specialized,
        tile_config=partial(_tile_config, block_n),
    )


def _functions() -> Any:
    from moe_fp8.kernels.hopper_blockwise import prefetch, scaled_mm_blockwise

    return prefetch, scaled_mm_blockwise


def _tile_config(block_n: int, config: TileConfig) -> TileConfig:
    """Adapt the tile configuration of the specialized kernel to the tile kernel.

    If scales differ among the columns of a tile, the registers do not suffice for 128 rows of gate and up.
    """
    if config.warp_specialized and block_n < config.block_n:
        return replace(config, block_m=min(config.block_m, 64))
    return config
