"""Quantise the rows of x and write each to the places of its pairs in the sorted order.

For kernels that want the rows of a tile side by side.  Every row is read once; a copy of the quantised rows afterwards
would read them once per pair, from all over memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.schedule import expert_of
from moe_core.jit.pdl import begin_pdl


@triton.jit(do_not_specialize=["rows"])
def scatter_quantize_kernel(
    x,
    values,
    scales,
    quant_args,
    rows,
    columns,
    width,
    stride_x,
    stride_values,
    stride_scales,
    routing,
    positions,
    x_scales,
    stride_x_scales,
    quantize: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EVEN: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_G groups of GROUP columns per program, counted row by row; what is beyond the last column counts as 0.

    routing: `row_args` of `expert_of`; positions [rows * TOP_K]: the place of each pair of a local expert; values [P,
    width] and scales have one row per pair.  BY_EXPERT: `quantize` depends on the expert, so that every pair is
    quantised by itself.  EVEN: `width` is whole groups.  With x_scales [rows, groups] x are codes already, and only
    change places.
    """
    begin_pdl(PDL)
    groups = tl.cdiv(width, GROUP)
    index = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    row = index // groups
    group = index % groups
    inside = row < rows
    offset = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tile = tl.load(x + row[:, None] * stride_x + offset, mask=inside[:, None] & (offset < columns), other=0.0)
    if x_scales is not None:
        quantized = tile
        scale = tl.load(x_scales + row * stride_x_scales + group, mask=inside, other=0)
    elif not BY_EXPERT:
        quantized, scale = quantize(tile.to(tl.float32), quant_args, 0, 1)
    for slot in tl.static_range(TOP_K):
        pair = row * TOP_K + slot
        expert = expert_of(pair, inside, routing, "pairs")
        known = expert >= 0
        if BY_EXPERT:
            quantized, scale = quantize(tile.to(tl.float32), quant_args, tl.maximum(expert, 0)[:, None], 1)
        position = tl.load(positions + pair, mask=known, other=0).to(tl.int64)
        stored = known[:, None]
        if not EVEN:
            stored = stored & (offset < width)
        tl.store(values + position[:, None] * stride_values + offset, quantized, mask=stored)
        if scales is not None:
            tl.store(scales + position * stride_scales + group, scale, mask=known)
