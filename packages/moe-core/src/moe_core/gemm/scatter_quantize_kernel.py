"""Quantise the rows of x and write each to the places of its pairs in the sorted order.

For kernels that want the rows of a tile side by side.  Every row is read once; a copy of the quantised rows afterwards
would read them once per pair, from all over memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.schedule import expert_of
from moe_core.jit.pdl import begin_pdl
from moe_core.ops._sort_kernels import load_groups, store_groups


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
    """BLOCK_G groups of GROUP columns per program, see `load_groups` and `store_groups`.

    routing: `row_args` of `expert_of`; positions [rows * TOP_K]: the place of each pair of a local expert; values [P,
    width] and scales have one row per pair.  BY_EXPERT: `quantize` depends on the expert, so that every pair is
    quantised by itself.  With x_scales [rows, groups] x are codes already, and only
    change places.
    """
    begin_pdl(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    row, group, offset, inside, tile = load_groups(x, rows, columns, width, stride_x, index, GROUP)
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
        store_groups(
            values, scales, quantized, scale, position, group, offset, width, stride_values, stride_scales, known, EVEN
        )
