"""Quantize rows of x in place or into the sorted order.

Rows are the `RowsForKernels` of `moe_core.kernels.ops.sort`. The sorted order is for kernels that need the rows of a
tile to be adjacent. Every row is read once. Copying quantized rows afterwards would read them once per pair, from
scattered addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.gemm.tiles.launch import InUse
from moe_core.kernels.gemm.tiles.scaled_mm import routed
from moe_core.kernels.gemm.tiles.schedule import expert_of
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sort_kernels import groups_of, load_columns, quantize_groups, store_groups
from moe_core.kernels.ops.sort import QuantizeRows


@triton.jit
def rows_in_use(row, num_rows, row_args, IN_USE: tl.constexpr):
    """(mask of rows in use, their local expert; 0 where a row has several or none).

    IN_USE "tokens": row_args as in `routed`; "sorted": (number of rows,); "all": (); otherwise as in
    `schedule.expert_of`.
    """
    inside = row < num_rows
    expert = tl.zeros_like(row).to(tl.int32)
    if IN_USE == "tokens":
        return inside & routed(row, inside, row_args), expert
    elif IN_USE == "sorted":
        return inside & (row < tl.load(row_args[0])), expert
    elif IN_USE == "all":
        return inside, expert
    else:
        expert = expert_of(row, inside, row_args, IN_USE)
        return inside & (expert >= 0), tl.maximum(expert, 0)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    rows,
    num_rows,
    row_args,
    positions,
    x_scales,
    stride_x_scales,
    IN_USE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize BLOCK_G groups per program, of rows in use; see `groups_of` and `store_groups`.

    positions [num_rows * TOP_K]: position in the result of each pair that has a local expert. BY_EXPERT: `quantize`
    depends on the expert, so that every pair is quantized separately. With x_scales [num_rows, groups], x already holds
    codes, which are only moved.
    """
    begin_pdl(PDL)
    index = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    if positions is None:
        # Groups are whole rows.
        used, expert = rows_in_use(index, num_rows, row_args, IN_USE)
        if tl.sum(used.to(tl.int32), axis=0) > 0:
            quantize_groups(rows, index, 0, tl.arange(0, rows.group)[None, :], used, expert[:, None])
    else:
        row, group, columns = groups_of(rows, index)
        inside = row < num_rows
        tile = load_columns(rows, row[:, None], columns, inside[:, None])
        if x_scales is not None:
            quantized = tile
            scale = tl.load(x_scales + row * stride_x_scales + group, mask=inside, other=0)
        elif not BY_EXPERT:
            quantized, scale = rows.quantize(tile.to(tl.float32), rows.arguments, 0, 1)
        for slot in tl.static_range(TOP_K):
            pair = row * TOP_K + slot
            expert = expert_of(pair, inside, row_args, "pairs")
            known = expert >= 0
            if BY_EXPERT:
                tile_expert = tl.maximum(expert, 0)[:, None]
                quantized, scale = rows.quantize(tile.to(tl.float32), rows.arguments, tile_expert, 1)
            position = tl.load(positions + pair, mask=known, other=0).to(tl.int64)
            store_groups(rows, quantized, scale, position, group, columns, known)


def quantize_rows(
    rows: QuantizeRows,
    in_use: InUse,
    *,
    positions: Tensor | None = None,
    by_expert: bool = False,
    x_scale: Tensor | None = None,
    pdl: bool,
) -> None:
    """Quantize ``rows`` that are in use, in place or into the sorted order.

    Without ``positions``, the groups must be whole rows.

    Args:
        rows: Rows, destination and quantization. With ``positions``, ``rows.x`` is [M, K], ``rows.values`` [P, K
            padded] and ``rows.scales`` [P, groups].
        in_use: Selector of the rows in use.
        positions: Sorted position of each pair (`sort_pairs(positions=True)`), or None.
        by_expert: Whether the result depends on the expert (static scales), so that each pair is quantized separately.
        x_scale: [M, groups]; ``rows.x`` then already holds codes, which are only moved, with their scales.
        pdl: Whether the launch overlaps with its neighbors.
    """
    # For scattered groups, 16 groups of 128: enough programs for many rows, and enough bytes per program.
    block_g = max((4096 if positions is None else 2048) // rows.group, 1)
    kind, row_args = in_use
    launch(
        quantize_rows_kernel,
        (-(-rows.num_groups // block_g),),
        rows.for_kernels,
        rows.x.shape[0],
        row_args,
        positions,
        x_scale,
        0 if x_scale is None else x_scale.stride(0),
        IN_USE=kind,
        TOP_K=1 if positions is None else row_args[2],
        BLOCK_G=block_g,
        BY_EXPERT=by_expert,
        pdl=pdl,
        num_warps=min(max(rows.group // 1024, 4), 16),
    )
