"""Which rows a program of the grouped matrix product works on.

A schedule is a pair of things: a tuple of tensors (the kernel's argument `S`) and a `@triton.jit` function
`locate(S, tile, BLOCK_M, PIECES)` that turns the number of a piece of a tile into

    expert      scalar, the local expert whose weights the tile multiplies
    position    [BLOCK_M] int64, rows of the sorted (expert-grouped) order
    pair        [BLOCK_M] int64, (token * top_k + slot) of each row
    mask        [BLOCK_M] bool, rows that exist; the others repeat the last one, so that they may be read

plus `tiles(S)`, the number of tiles that exist; each has PIECES pieces of BLOCK_M rows, of which the last may be empty.
The matrix product knows nothing else about routing, so another activation format needs another schedule and no other
kernel.  Both schedules read the same list of tiles; `moe_core.ops.sort` and `moe_core.ops.batch` write it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sorted_tiles(S):
    """Number of tiles of a sorted schedule (device scalar, int32)."""
    tiles, offsets, pairs = S
    return tl.load(tiles)


@triton.jit
def sorted_locate(S, piece, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """Tiles over pairs that `moe_core.ops.sort` has grouped by expert.

    S = (tiles [2 + 2 * T] int32, expert_offsets [E + 1] int32, sorted_pairs [P] int32): tiles[0] is the number of
    tiles, tiles[2 + 2t] the expert of tile t and tiles[3 + 2t] its first row.
    """
    tiles, offsets, pairs = S
    tile = piece // PIECES
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile) + piece % PIECES * BLOCK_M
    end = tl.load(offsets + expert + 1)
    row = first + tl.arange(0, BLOCK_M)
    mask = row < end
    position = tl.minimum(row, end - 1)  # the tile's first row at least exists
    pair = tl.load(pairs + position)
    return expert, position.to(tl.int64), pair.to(tl.int64), mask


@triton.jit
def batched_tiles(S):
    """Number of tiles of a batched schedule (device scalar, int32)."""
    tiles, ends = S
    return tl.load(tiles)


@triton.jit
def batched_locate(S, piece, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """Tiles over rows that arrive grouped, [E, T_max, ...]: row r of expert e is e * T_max + r.

    S = (tiles [2 + 2 * T] int32, ends [E + 1] int32) as `moe_core.ops.batch` writes them: tiles as in a sorted
    schedule, ends[e + 1] the row behind the last one in use.  A row is its own pair.
    """
    tiles, ends = S
    tile = piece // PIECES
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile) + piece % PIECES * BLOCK_M
    end = tl.load(ends + expert + 1)
    row = first + tl.arange(0, BLOCK_M)
    position = tl.minimum(row, end - 1).to(tl.int64)
    return expert, position, position, row < end
