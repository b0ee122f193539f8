"""Kernels of `moe_core.kernels.ops.permute`: move rows between token order and expert order."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._sort_kernels import local_expert


@triton.jit
def move_rows_kernel(
    source,
    index,
    target,
    source_scale,
    target_scale,
    count,
    limit,
    columns,
    scale_columns,
    stride_source,
    stride_target,
    stride_source_scale,
    stride_source_group,
    stride_target_scale,
    stride_target_group,
    PER_ROW: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy row index[p] // PER_ROW to row p or, if SCATTER, row p // PER_ROW to row index[p].

    An index outside 0 .. limit gives zeros or, if SCATTER, writes nothing. Only the first count[0] rows p are
    processed, if given.
    """
    begin_pdl(PDL)
    p = tl.program_id(0) + tl.zeros([1], dtype=tl.int32)
    there = tl.load(index + p).to(tl.int64)
    exists = (there >= 0) & (there < limit)
    wanted = exists if SCATTER else p >= 0
    if count is not None:
        wanted = wanted & (p < tl.load(count).to(tl.int32))
    here = p.to(tl.int64)
    source_row = here // PER_ROW if SCATTER else there // PER_ROW
    target_row = there if SCATTER else here
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < columns) & wanted
    values = tl.load(source + source_row * stride_source + column, mask=mask & exists, other=0)
    tl.store(target + target_row * stride_target + column, values, mask=mask)
    if source_scale is not None:
        if tl.program_id(1) == 0:
            group = tl.arange(0, BLOCK_S).to(tl.int64)
            present = (group < scale_columns) & wanted
            place = source_row * stride_source_scale + group * stride_source_group
            scale = tl.load(source_scale + place, mask=present & exists, other=0)
            tl.store(target_scale + target_row * stride_target_scale + group * stride_target_group, scale, mask=present)


@triton.jit
def assign_slots_kernel(
    ids,
    expert_map,
    places,
    counts,
    num_pairs,
    num_ids,
    num_experts,
    max_tokens,
    HAS_MAP: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Number the pairs of one expert per program, in pair order.

    places[pair] = expert * max_tokens + number. Pairs without a local expert and pairs beyond max_tokens get -1. No
    atomics: the same result on every run.
    """
    begin_pdl(PDL)
    me = tl.program_id(0)
    found = 0
    for step in range(STEPS):
        pair = step * BLOCK + tl.arange(0, BLOCK)
        inside = pair < num_pairs
        expert = local_expert(ids, expert_map, pair, inside, num_ids, num_experts, HAS_MAP)
        mine = expert == me
        number = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(places + pair, tl.where(number < max_tokens, me * max_tokens + number, -1), mask=mine)
        # only program 0 marks pairs without an expert: -1 + me is negative for no other program
        tl.store(places + pair, tl.full([BLOCK], -1, tl.int32), mask=inside & (expert + me < 0))
        found += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + me, tl.minimum(found, max_tokens))
