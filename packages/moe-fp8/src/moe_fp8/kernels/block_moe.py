"""Block FP8 as the fused layer takes it: the weights, and how activations are quantised."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton.language as tl
from moe_core.experts_api import TileConfig
from moe_core.kernel_api import (
    GemmWeight,
    GroupScheme,
    TileFunctions,
    WarpSpecialisedGemm,
    load_blocks,
    open_blocks,
    prefetch_weights,
    quantize_group,
    weight_strides,
)
from torch import Tensor

from moe_fp8.kernels import block

_TILE = TileFunctions(
    open_blocks, load_blocks, block.open_weights, block.load_weights, block.multiply, prefetch_b=prefetch_weights
)
#: weight blocks of the warp-specialised kernel
HOPPER_BLOCKS = ((128, 128), (64, 128), (128, 64), (64, 64))


def block_scheme(block_k: int) -> GroupScheme:
    """x and h in e4m3, one float32 scale per row and ``block_k`` columns."""
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
    """e4m3 ``weights`` [E, rows of all halves, K], or block-major; ``rows`` of one half.

    ``scales`` [E, halves * ceil(rows / block_n), ceil(K / block_k)] float32: gate and up each own their partial last
    row of blocks.  ``block_shape`` (block_n, block_k): powers of two from 32 and 16 on.
    """
    block_n, block_k = block_shape
    strides = scales.stride(0), scales.stride(1), tl.constexpr(block_n)
    warp_specialised = None
    if block_shape in HOPPER_BLOCKS:
        warp_specialised = WarpSpecialisedGemm(weights, _functions, (scales, *strides), block_k)
    return GemmWeight(
        (weights, scales, *weight_strides(weights, block_k), *strides),
        rows,
        weights.shape[1] * weights.shape[3] if weights.dim() == 4 else weights.shape[2],
        lambda config: _TILE,
        block_k,
        bias,
        warp_specialised=warp_specialised,
        tile_config=partial(_tile_config, block_n),
    )


def _functions() -> Any:
    from moe_fp8.kernels.hopper_blockwise import prefetch, scaled_mm_blockwise

    return prefetch, scaled_mm_blockwise


def _tile_config(block_n: int, config: TileConfig) -> TileConfig:
    """For the tile kernel, what was chosen for the specialised one.

    Scales that differ among the columns of a tile leave no registers for 128 rows of gate and up.
    """
    if config.warp_specialised and block_n < config.block_n:
        return replace(config, block_m=min(config.block_m, 64))
    return config
