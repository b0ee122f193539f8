"""Which rows a program of the grouped GEMM works on.

A schedule is a pair of things: a tuple of tensors (the kernel's argument `schedule`) and a `@triton.jit` function
`locate(schedule, subtile, BLOCK_M, SUBTILES)` that turns the number of a subtile into

    expert      scalar, the local expert whose weights the tile multiplies
    position    [BLOCK_M] int64, rows of the sorted (expert-grouped) order
    pair        [BLOCK_M] int64, (token * top_k + slot) of each row
    mask        [BLOCK_M] bool, rows that exist; the others repeat the last one, so that they may be read

plus `tiles(schedule)`, the number of tiles; each has SUBTILES subtiles of BLOCK_M rows, of which the last may be empty.
The kernel knows nothing else about routing, so another activation format needs another schedule and no other
kernel.  Both schedules read the same list of tiles; `moe_core.ops.sort` and `moe_core.ops.batch` write it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sorted_tiles(schedule):
    """Number of tiles of a sorted schedule (device scalar, int32)."""
    tiles, offsets, pairs = schedule
    return tl.load(tiles)


@triton.jit
def sorted_locate(schedule, subtile, BLOCK_M: tl.constexpr, SUBTILES: tl.constexpr):
    """Tiles over pairs that `moe_core.ops.sort` has grouped by expert.

    schedule = (tiles [2 + 2 * T], expert_offsets [E + 1], sorted_pairs [P]), int32: tiles[0] is the number of tiles,
    tiles[2 + 2t] the expert of tile t and tiles[3 + 2t] its first row.
    """
    tiles, offsets, pairs = schedule
    tile = subtile // SUBTILES
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile) + subtile % SUBTILES * BLOCK_M
    end = tl.load(offsets + expert + 1)
    row = first + tl.arange(0, BLOCK_M)
    mask = row < end
    position = tl.minimum(row, end - 1)  # the tile's first row at least exists
    pair = tl.load(pairs + position)
    return expert, position.to(tl.int64), pair.to(tl.int64), mask


@triton.jit
def batched_tiles(schedule):
    """Number of tiles of a batched schedule (device scalar, int32)."""
    tiles, ends = schedule
    return tl.load(tiles)


@triton.jit
def batched_locate(schedule, subtile, BLOCK_M: tl.constexpr, SUBTILES: tl.constexpr):
    """Tiles over rows that arrive grouped, [E, T_max, ...]: row r of expert e is e * T_max + r.

    schedule = (tiles [2 + 2 * T] int32, ends [E + 1] int32) as `moe_core.ops.batch` writes them: tiles as in a sorted
    schedule, ends[e + 1] the row behind the last one in use.  A row is its own pair.
    """
    tiles, ends = schedule
    tile = subtile // SUBTILES
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile) + subtile % SUBTILES * BLOCK_M
    end = tl.load(ends + expert + 1)
    row = first + tl.arange(0, BLOCK_M)
    position = tl.minimum(row, end - 1).to(tl.int64)
    return expert, position, position, row < end
