"""Kernels of `moe_core.kernels.ops.sort`: group pairs by expert, and quantize rows.

Both happen in the same launch. Pairs are split into chunks, with one program per chunk. The position of a pair is the
number of pairs of lower experts, plus those of its expert in earlier chunks, plus those of its expert before it in the
chunk. The order within an expert is thus the order of the pairs, regardless of timing: no atomics in memory, and the
same result on every run. Up to a few thousand pairs every program counts all of them; beyond that a first launch counts
each chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl

# modes of a launch
SORT = tl.constexpr(0)  # everything: each program counts all pairs
COUNT = tl.constexpr(1)  # counts only, for SCATTER in a second launch
SCATTER = tl.constexpr(2)
TINY = tl.constexpr(3)  # everything, for at most BLOCK_P pairs, with one program per expert


@triton.jit
def local_expert(ids, expert_map, pair, mask, num_ids, num_experts, HAS_MAP: tl.constexpr):
    """Return the local expert of each pair, or -1.

    It is -1 if the id or the mapped id is out of range, or the pair is masked.
    """
    # ids may have 64 bits: compare before truncation
    expert = tl.load(ids + pair, mask=mask, other=-1)
    known = mask & (expert >= 0) & (expert < num_ids)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=known, other=-1)
        known = known & (expert >= 0) & (expert < num_experts)
    return tl.where(known, expert, -1).to(tl.int32)


@triton.jit
def _histogram(expert, BLOCK_E: tl.constexpr):
    """Count the pairs of each expert among `expert`, ignoring pairs without an expert (-1)."""
    return tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)


@triton.jit
def _count(
    ids,
    expert_map,
    first,
    end,
    num_ids,
    num_experts,
    HAS_MAP: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Count the pairs of each expert among pairs first .. end."""
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(first, end, BLOCK_COUNT):
        pair = start + tl.arange(0, BLOCK_COUNT)
        expert = local_expert(ids, expert_map, pair, pair < end, num_ids, num_experts, HAS_MAP)
        counts += _histogram(expert, BLOCK_E)
    return counts


@triton.jit
def _add_counts(counts, chunks, me, num_experts, BLOCK_E: tl.constexpr):
    """Sum counts [chunks, num_experts] over all chunks, and over those before `me`."""
    # accumulated as a block: one reduction over warps at the end instead of one per step
    BLOCK_CHUNKS: tl.constexpr = max(4096 // BLOCK_E, 1)
    total = tl.zeros((BLOCK_CHUNKS, BLOCK_E), dtype=tl.int32)
    earlier = tl.zeros((BLOCK_CHUNKS, BLOCK_E), dtype=tl.int32)
    expert = tl.arange(0, BLOCK_E)[None, :]
    for start in range(0, chunks, BLOCK_CHUNKS):
        chunk = start + tl.arange(0, BLOCK_CHUNKS)[:, None]
        count = tl.load(counts + chunk * num_experts + expert, mask=(chunk < chunks) & (expert < num_experts), other=0)
        total += count
        earlier += tl.where(chunk < me, count, 0)
    return tl.sum(total, axis=0), tl.sum(earlier, axis=0)


@triton.jit
def _place(
    ids,
    expert_map,
    tiles,
    offsets,
    sorted_pairs,
    positions,
    total,
    earlier,
    begin,
    end,
    num_ids,
    num_experts,
    tile_rows,
    me,
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Place pairs begin .. end.

    `total` is the number of pairs of each expert, `earlier` the number before `begin`.
    """
    first = tl.cumsum(total, axis=0) - total
    count_tiles = (total + tile_rows - 1) // tile_rows
    first_tile = tl.cumsum(count_tiles, axis=0) - count_tiles
    if me == 0:
        experts = tl.arange(0, BLOCK_E)
        tl.store(offsets + experts, first, mask=experts < num_experts)
        tl.store(offsets + num_experts, tl.sum(total, axis=0))
        tl.store(tiles, tl.sum(count_tiles, axis=0))
        tl.store(tiles + 1, 0)
    lane = tl.arange(0, BLOCK_P)
    for start in range(begin, end, BLOCK_P):
        pair = start + lane
        expert = local_expert(ids, expert_map, pair, pair < end, num_ids, num_experts, HAS_MAP)
        # sorts the block by expert, then pair; the key of dropped pairs is above all others
        key = tl.sort(tl.where(expert >= 0, expert, num_experts) * BLOCK_P + lane)
        pair = start + key % BLOCK_P
        expert = key // BLOCK_P
        known = expert < num_experts
        own = _histogram(tl.where(known, expert, -1), BLOCK_E)
        expert = tl.where(known, expert, 0)
        # `lane` also counts the pairs of lower experts in the block
        rank = lane + tl.gather(earlier - (tl.cumsum(own, axis=0) - own), expert, axis=0)
        row = rank + tl.gather(first, expert, axis=0)
        tl.store(sorted_pairs + row, pair, mask=known)
        if positions is not None:
            tl.store(positions + pair, row, mask=known)
        starts = known & (rank % tile_rows == 0)
        tile = rank // tile_rows + tl.gather(first_tile, expert, axis=0)
        tl.store(tiles + 2 + 2 * tile, expert, mask=starts)
        tl.store(tiles + 3 + 2 * tile, row, mask=starts)
        earlier += own


@triton.jit
def _sort_tiny(
    ids,
    expert_map,
    tiles,
    offsets,
    sorted_pairs,
    positions,
    num_pairs,
    num_ids,
    num_experts,
    tile_rows,
    me,
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Sort the pairs of expert `me`, for few pairs.

    Ranks come from a BLOCK_P x BLOCK_P comparison instead of histograms and scans.
    """
    pair = tl.arange(0, BLOCK_P)
    expert = local_expert(ids, expert_map, pair, pair < num_pairs, num_ids, num_experts, HAS_MAP)
    # the same vector along the other dimension
    other = tl.arange(0, BLOCK_P)
    other_expert = local_expert(ids, expert_map, other, other < num_pairs, num_ids, num_experts, HAS_MAP)
    earlier = (other[None, :] < pair[:, None]) & (other_expert[None, :] == expert[:, None])
    rank = tl.sum(earlier.to(tl.int32), axis=1)
    before = (expert >= 0) & (expert < me)
    mine = expert == me
    first = tl.sum(before.to(tl.int32), axis=0)
    own = tl.sum(mine.to(tl.int32), axis=0)
    first_tile = tl.sum((before & (rank % tile_rows == 0)).to(tl.int32), axis=0)
    tl.store(offsets + me, first)
    if me == num_experts - 1:
        tl.store(offsets + num_experts, first + own)
        tl.store(tiles, first_tile + tl.cdiv(own, tile_rows))
        tl.store(tiles + 1, 0)
    tl.store(sorted_pairs + first + rank, pair, mask=mine)
    if positions is not None:
        tl.store(positions + pair, first + rank, mask=mine)
    starts = mine & (rank % tile_rows == 0)
    tile = first_tile + rank // tile_rows
    tl.store(tiles + 2 + 2 * tile, tl.zeros((BLOCK_P,), tl.int32) + me, mask=starts)
    tl.store(tiles + 3 + 2 * tile, first + rank, mask=starts)


@triton.jit
def load_columns(rows, row, column, mask):
    """Load `column` of rows of x where `mask`, without conversion.

    Columns beyond the last of `columns` are 0.
    """
    columns = rows.columns
    if rows.single:
        # columns would be a constant, so the other columns were known to be 0; `ptxas` 12.8 then crashes or miscompiles
        # their codes. Adding program_id(2), always 0, hides the constant from the compiler
        columns += tl.program_id(2)
    return tl.load(rows.x + row * rows.stride_x + column, mask=mask & (column < columns), other=0.0)


@triton.jit
def groups_of(rows, index):
    """Return (row, group, columns) of groups `index` of `rows`, a `RowsForKernels`.

    Groups are counted row by row, in rows of `width` columns.
    """
    groups = tl.cdiv(rows.width, rows.group)
    row = index // groups
    group = index % groups
    return row, group, group[:, None] * rows.group + tl.arange(0, rows.group)[None, :]


@triton.jit
def store_groups(rows, quantized, scale, row, group, columns, mask):
    """Store the groups of `groups_of` and their scales in `row` where `mask`."""
    if rows.out is not None:
        stored = mask[:, None]
        if not rows.even:
            stored = stored & (columns < rows.width)
        tl.store(rows.out + row[:, None] * rows.stride_out + columns, quantized, mask=stored)
    if rows.scales is not None:
        tl.store(rows.scales + row * rows.stride_scales + group, scale, mask=mask)


@triton.jit
def quantize_groups(rows, row, group, columns, used, expert):
    """Quantize the groups of `groups_of` where they are `used`.

    `quantize` gets `expert` [groups, 1]. `out` None keeps only the scales, `scales` None only the values.
    """
    tile = load_columns(rows, row[:, None], columns, used[:, None]).to(tl.float32)
    quantized, scale = rows.quantize(tile, rows.arguments, expert, 1)
    store_groups(rows, quantized, scale, row, group, columns, used)


@triton.jit(do_not_specialize=["sorters", "num_zeros", "num_rows"])
def sort_kernel(
    ids,
    expert_map,
    counts,
    tiles,
    offsets,
    sorted_pairs,
    positions,
    num_pairs,
    num_ids,
    num_experts,
    tile_rows,
    sorters,
    chunk,
    zero,
    num_zeros,
    rows,
    num_rows,
    MODE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_COUNT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sort pairs by expert, and quantize rows in the same launch.

    Programs 0 .. sorters - 1 sort, the others quantize `rows`; all of them write zeros to `zero`. A sorter handles one
    expert if MODE is TINY, else `chunk` pairs, a multiple of BLOCK_P.

    Writes tiles, offsets, sorted_pairs and, unless None, positions (the inverse of sorted_pairs) as
    `moe_core.kernels.gemm.tiles.schedule` reads them, or counts [sorters, E] if MODE is COUNT.
    """
    begin_pdl(PDL)
    me = tl.program_id(0)
    if zero is not None:
        for start in range(me * BLOCK_P, num_zeros, tl.num_programs(0) * BLOCK_P):
            index = start + tl.arange(0, BLOCK_P)
            tl.store(zero + index, tl.zeros((BLOCK_P,), tl.int32), mask=index < num_zeros)
    if me >= sorters:
        if rows.quantize is not None:
            index = ((me - sorters) * BLOCK_G).to(tl.int64) + tl.arange(0, BLOCK_G)
            row, group, columns = groups_of(rows, index)
            quantize_groups(rows, row, group, columns, row < num_rows, row[:, None])
    elif MODE == TINY:
        _sort_tiny(
            ids,
            expert_map,
            tiles,
            offsets,
            sorted_pairs,
            positions,
            num_pairs,
            num_ids,
            num_experts,
            tile_rows,
            me,
            HAS_MAP,
            BLOCK_P,
        )
    else:
        begin = me * chunk
        end = tl.minimum(begin + chunk, num_pairs)
        if MODE == COUNT:
            count = _count(ids, expert_map, begin, end, num_ids, num_experts, HAS_MAP, BLOCK_COUNT, BLOCK_E)
            experts = tl.arange(0, BLOCK_E)
            tl.store(counts + me * num_experts + experts, count, mask=experts < num_experts)
        else:
            if MODE == SCATTER:
                total, earlier = _add_counts(counts, sorters, me, num_experts, BLOCK_E)
            else:
                earlier = _count(ids, expert_map, 0, begin, num_ids, num_experts, HAS_MAP, BLOCK_COUNT, BLOCK_E)
                total = earlier + _count(
                    ids, expert_map, begin, num_pairs, num_ids, num_experts, HAS_MAP, BLOCK_COUNT, BLOCK_E
                )
            _place(
                ids,
                expert_map,
                tiles,
                offsets,
                sorted_pairs,
                positions,
                total,
                earlier,
                begin,
                end,
                num_ids,
                num_experts,
                tile_rows,
                me,
                HAS_MAP,
                BLOCK_P,
                BLOCK_E,
            )
