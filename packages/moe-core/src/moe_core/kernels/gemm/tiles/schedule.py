"""Map programs of the grouped GEMM to tiles, and tiles to rows.

    schedule = (tiles [2 + 2 * T], offsets [E + 1], pairs [P] or None), int32

tiles[0] is the number of tiles, tiles[2 + 2t] the expert of tile t, and tiles[3 + 2t] its first row. offsets[e + 1] is
the end of expert e's rows (exclusive). There are two producers of schedules:

- `moe_core.kernels.ops.sort`, for rows sorted by expert. pairs holds the pair (token * top_k + slot) of each row.
- `moe_core.kernels.ops.batch`, for rows that arrive grouped, [E, T_max, ...]. Row r of expert e is e * T_max + r, which
  is also its pair: pairs is None.

The schedule is all that the kernels know about routing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.ops._sort_kernels import local_expert


@triton.jit
def tile_of(index, tiles, blocks_n, GROUP_M: tl.constexpr):
    """(tile, column block) of a program; GROUP_M row tiles share the columns in flight."""
    if GROUP_M == 1:
        return index // blocks_n, index % blocks_n
    else:
        group = index // (GROUP_M * blocks_n)
        first = group * GROUP_M
        size = tl.minimum(tiles - first, GROUP_M)
        within = index % (GROUP_M * blocks_n)
        return first + within % size, within // size


@triton.jit
def locate(schedule, subtile, BLOCK_M: tl.constexpr, SUBTILES: tl.constexpr):
    """The rows of a subtile.

    Each tile has SUBTILES of BLOCK_M rows, the last of which may be empty.

    expert      scalar, the local expert whose weights the tile multiplies
    position    [BLOCK_M] int64, rows of the sorted (expert-grouped) order
    pair        [BLOCK_M] int64, pair of each row
    mask        [BLOCK_M] bool, rows that exist; the others repeat the last one, so that they can be read
    """
    tiles, offsets, pairs = schedule
    tile = subtile // SUBTILES
    expert = tl.load(tiles + 2 + 2 * tile)
    first = tl.load(tiles + 3 + 2 * tile) + subtile % SUBTILES * BLOCK_M
    end = tl.load(offsets + expert + 1)
    row = first + tl.arange(0, BLOCK_M)
    mask = row < end
    position = tl.minimum(row, end - 1)  # at least the tile's first row exists
    pair = position
    if pairs is not None:
        pair = tl.load(pairs + position)
    return expert, position.to(tl.int64), pair.to(tl.int64), mask


@triton.jit
def expert_of(row, inside, row_args, IN_USE: tl.constexpr):
    """Local expert of rows by pair, negative where there is none; arguments from `in_use`.

    `in_use` is the property of a `Routing` or a `Batch`. IN_USE "pairs": row_args = (ids, expert_map, top_k, num_ids,
    num_experts); "batched": (counts [E], capacity).
    """
    if IN_USE == "batched":
        counts, capacity = row_args
        expert = row // capacity
        used = inside & (row % capacity < tl.load(counts + expert, mask=inside, other=0))
        return tl.where(used, expert, -1).to(tl.int32)
    else:
        tl.static_assert(IN_USE == "pairs", "rows by pair are those of a routing or of a batch")
        ids, expert_map, _, num_ids, num_experts = row_args
        return local_expert(ids, expert_map, row, inside, num_ids, num_experts, expert_map is not None)


@triton.jit
def locate_vector(row_args, blocks, SECOND: tl.constexpr, ALONG_M: tl.constexpr):
    """(pair, row of the vector, row block, local expert) of a GEMV program.

    row_args: of "pairs" in `expert_of`. SECOND: each pair has a separate vector; otherwise a token's pairs share one.
    ALONG_M: neighboring programs take one row block of all pairs; otherwise all row blocks of one pair.
    """
    index = tl.program_id(0)
    if ALONG_M:
        pairs = tl.num_programs(0) // blocks
        pair = (index % pairs).to(tl.int64)
        block = index // pairs
    else:
        pair = (index // blocks).to(tl.int64)
        block = index % blocks
    row = pair if SECOND else pair // row_args[2]
    return pair, row, block, expert_of(pair, pair >= 0, row_args, "pairs")
