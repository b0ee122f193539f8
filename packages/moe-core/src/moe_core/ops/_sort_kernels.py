"""Device code of `moe_core.ops.sort`: group (token, slot) pairs by expert, and quantise rows beside it.

Every expert has a program of its own that scans all ids, so that the order within an expert is the order of the
pairs, whatever the timing: no atomics, the same result on every run.  The scan costs E * P id reads, all from L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

# what one launch does
SORT = tl.constexpr(0)  # everything: each program counts all experts by itself
COUNT = tl.constexpr(1)  # counts only, for SCATTER in a second launch
SCATTER = tl.constexpr(2)
TINY = tl.constexpr(3)  # everything, for at most BLOCK_P pairs, by comparing each with each


@triton.jit
def local_expert(ids, expert_map, pair, mask, num_ids, num_experts, HAS_MAP: tl.constexpr):
    """Local expert of each pair, or -1: id or mapped id out of range, or no such pair."""
    # ids may have 64 bits: compared before they are cut
    expert = tl.load(ids + pair, mask=mask, other=-1)
    known = mask & (expert >= 0) & (expert < num_ids)
    if HAS_MAP:
        expert = tl.load(expert_map + expert, mask=known, other=-1)
        known = known & (expert >= 0) & (expert < num_experts)
    return tl.where(known, expert, -1).to(tl.int32)


@triton.jit
def _count_all(
    ids, expert_map, pairs, num_ids, num_experts, HAS_MAP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(0, pairs, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        expert = local_expert(ids, expert_map, pair, pair < pairs, num_ids, num_experts, HAS_MAP)
        # the last bin collects what is dropped: BLOCK_E > num_experts
        counts += tl.histogram(tl.where(expert >= 0, expert, BLOCK_E - 1), BLOCK_E)
    return counts


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
    """The part of expert `me`: ranks from a BLOCK_P x BLOCK_P comparison instead of histograms and scans."""
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
    tl.store(sorted_pairs + first + rank, pair, mask=mine)
    if positions is not None:
        tl.store(positions + pair, first + rank, mask=mine)
    starts = mine & (rank % tile_rows == 0)
    tile = first_tile + rank // tile_rows
    tl.store(tiles + 2 + 2 * tile, tl.zeros((BLOCK_P,), tl.int32) + me, mask=starts)
    tl.store(tiles + 3 + 2 * tile, first + rank, mask=starts)


@triton.jit
def quantize_groups(
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
    index,
    expert,
    quantize: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Quantise groups `index` of GROUP columns, counted row by row; what is beyond the last column counts as 0.

    The result has `width` columns; EVEN: they are whole groups.  `values` None keeps the scales alone, `scales` None
    the values.  `expert` None gives `quantize` the number of the row.
    """
    groups = tl.cdiv(width, GROUP)
    row = index // groups
    group = index % groups
    inside = row < rows
    offset = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tile = tl.load(x + row[:, None] * stride_x + offset, mask=inside[:, None] & (offset < columns), other=0.0)
    quantized, scale = quantize(tile.to(tl.float32), quant_args, row[:, None] if expert is None else expert, 1)
    if values is not None:
        stored = inside[:, None]
        if not EVEN:
            stored = stored & (offset < width)
        tl.store(values + row[:, None] * stride_values + offset, quantized, mask=stored)
    if scales is not None:
        tl.store(scales + row * stride_scales + group, scale, mask=inside)


@triton.jit(do_not_specialize=["num_zeros", "rows"])
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
    zero,
    num_zeros,
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
    MODE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    quantize: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0 .. num_experts - 1 sort, the others quantise rows of x; all of them write zeros to `zero`.

    Writes tiles, offsets, sorted_pairs and, unless None, positions (the inverse of sorted_pairs) as
    `moe_core.gemm.schedule` reads them, or counts [E] when MODE is COUNT.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    me = tl.program_id(0)
    if zero is not None:
        for start in range(me * BLOCK_P, num_zeros, tl.num_programs(0) * BLOCK_P):
            index = start + tl.arange(0, BLOCK_P)
            tl.store(zero + index, tl.zeros((BLOCK_P,), tl.int32), mask=index < num_zeros)
    if me >= num_experts:
        if quantize is not None:
            quantize_groups(
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
                ((me - num_experts) * BLOCK_G).to(tl.int64) + tl.arange(0, BLOCK_G),
                None,
                quantize,
                GROUP,
                EVEN,
            )
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
    elif MODE == COUNT:
        total = tl.zeros((BLOCK_P,), dtype=tl.int32)
        for start in range(0, num_pairs, BLOCK_P):
            pair = start + tl.arange(0, BLOCK_P)
            expert = local_expert(ids, expert_map, pair, pair < num_pairs, num_ids, num_experts, HAS_MAP)
            total += (expert == me).to(tl.int32)
        tl.store(counts + me, tl.sum(total, axis=0))
    else:
        experts = tl.arange(0, BLOCK_E)
        if MODE == SCATTER:
            count = tl.load(counts + experts, mask=experts < num_experts, other=0)
        else:
            count = _count_all(ids, expert_map, num_pairs, num_ids, num_experts, HAS_MAP, BLOCK_P, BLOCK_E)
            count = tl.where(experts < num_experts, count, 0)
        count_tiles = (count + tile_rows - 1) // tile_rows
        first = tl.sum(tl.where(experts < me, count, 0), axis=0)
        own = tl.sum(tl.where(experts == me, count, 0), axis=0)
        first_tile = tl.sum(tl.where(experts < me, count_tiles, 0), axis=0)
        tl.store(offsets + me, first)
        if me == num_experts - 1:
            tl.store(offsets + num_experts, first + own)
            tl.store(tiles, first_tile + tl.cdiv(own, tile_rows))
        for start in range(0, tl.cdiv(own, tile_rows), 32):
            tile = start + tl.arange(0, 32)
            exists = tile < tl.cdiv(own, tile_rows)
            tl.store(tiles + 2 + 2 * (first_tile + tile), tl.zeros((32,), tl.int32) + me, mask=exists)
            tl.store(tiles + 3 + 2 * (first_tile + tile), first + tile * tile_rows, mask=exists)
        if own > 0:
            for start in range(0, num_pairs, BLOCK_P):
                pair = start + tl.arange(0, BLOCK_P)
                expert = local_expert(ids, expert_map, pair, pair < num_pairs, num_ids, num_experts, HAS_MAP)
                mine = (expert == me).to(tl.int32)
                position = first + tl.cumsum(mine, axis=0) - 1
                tl.store(sorted_pairs + position, pair, mask=mine > 0)
                if positions is not None:
                    tl.store(positions + pair, position, mask=mine > 0)
                first += tl.sum(mine, axis=0)
