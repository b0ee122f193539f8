"""Which rows a program of the grouped matrix product works on.

A schedule is a pair of things: a tuple of tensors (device side argument `S`) and a `@triton.jit` function
`locate(S, tile, BLOCK_M)` that turns a tile number into

    expert      scalar, the local expert whose weights the tile multiplies
    position    [BLOCK_M] int64, rows of the sorted (expert-grouped) order
    pair        [BLOCK_M] int64, (token * top_k + slot) of each row
    mask        [BLOCK_M] bool, rows that exist

plus `tiles(S)`, the number of tiles that exist.  The matrix product knows nothing else about routing, so another
activation format needs another schedule and no other kernel.
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
def sorted_locate(S, tile, BLOCK_M: tl.constexpr):
    """Tiles over pairs that `moe_core.ops.sort` has grouped by expert.

    S = (tiles [2 + 2 * T] int32, expert_offsets [E + 1] int32, sorted_pairs [P] int32): tiles[0] is the number of
    tiles, tiles[2 + 2t] the expert of tile t and tiles[3 + 2t] its first row.
    """
    tiles, offsets, pairs = S
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile)
    end = tl.load(offsets + expert + 1)
    position = first + tl.arange(0, BLOCK_M)
    mask = position < end
    pair = tl.load(pairs + position, mask=mask, other=0)
    return expert, position.to(tl.int64), pair.to(tl.int64), mask
