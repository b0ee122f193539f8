"""Kernel of `moe_core.kernels.ops.batch`: tiles of batched rows, and quantization."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._sort_kernels import groups_of, quantize_groups


@triton.jit
def batch_kernel(
    counts,
    tiles,
    ends,
    num_experts,
    capacity,
    tile_rows,
    zero,
    num_zeros,
    rows,
    num_rows,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the tiles of the batch, and quantize its rows in the same launch.

    Programs 0 .. num_experts - 1 write tiles and ends as `moe_core.kernels.gemm.tiles.schedule` reads them. The other
    programs quantize the valid rows of `rows`, x [E * capacity, columns]. All of them write zeros to `zero`.
    """
    begin_pdl(PDL)
    me = tl.program_id(0)
    if zero is not None:
        for start in range(me * 256, num_zeros, tl.num_programs(0) * 256):
            index = start + tl.arange(0, 256)
            tl.store(zero + index, tl.zeros((256,), tl.int32), mask=index < num_zeros)
    if me < num_experts:
        experts = tl.arange(0, BLOCK_E)
        count = tl.load(counts + experts, mask=experts < num_experts, other=0)
        count = tl.minimum(tl.maximum(count, 0), capacity).to(tl.int32)
        first_tile = tl.sum(tl.where(experts < me, tl.cdiv(count, tile_rows), 0), axis=0)
        own = tl.sum(tl.where(experts == me, count, 0), axis=0)
        tl.store(ends + 1 + me, me * capacity + own)
        if me == num_experts - 1:
            tl.store(tiles, first_tile + tl.cdiv(own, tile_rows))
            tl.store(tiles + 1, 0)
        for start in range(0, tl.cdiv(own, tile_rows), 32):
            tile = start + tl.arange(0, 32)
            exists = tile < tl.cdiv(own, tile_rows)
            tl.store(tiles + 2 + 2 * (first_tile + tile), tl.zeros((32,), tl.int32) + me, mask=exists)
            tl.store(tiles + 3 + 2 * (first_tile + tile), me * capacity + tile * tile_rows, mask=exists)
    elif rows.quantize is not None:
        index = ((me - num_experts) * BLOCK_G).to(tl.int64) + tl.arange(0, BLOCK_G)
        row, group, columns = groups_of(rows, index)
        expert = row // capacity
        used = tl.load(counts + expert, mask=row < num_rows, other=0)
        used = (row < num_rows) & (row % capacity < used)
        if tl.sum(used.to(tl.int32), axis=0) > 0:
            quantize_groups(rows, row, group, columns, used, tl.where(used, expert, 0).to(tl.int32)[:, None])
