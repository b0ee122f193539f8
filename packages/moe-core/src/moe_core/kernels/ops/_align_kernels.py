"""Kernels of `moe_core.kernels.ops.align`: aligned rows, and local expert ids."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._sort_kernels import local_expert


@triton.jit
def align_kernel(
    tiles,
    offsets,
    pairs,
    index,
    row_experts,
    positions,
    count,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Expand tile t of the sort to rows t * BLOCK_M .. (t + 1) * BLOCK_M.

    Padding rows have index -1.
    """
    begin_pdl(PDL)
    used = tl.load(tiles)
    if tl.program_id(0) == 0:
        tl.store(count, used * BLOCK_M)
    # a tensor of one element: the interpreter does not accept a scalar as a mask
    tile = tl.program_id(0) + tl.zeros([1], dtype=tl.int32)
    exists = tile < used
    expert = tl.load(tiles + 2 + 2 * tile, mask=exists, other=-1)
    first = tl.load(tiles + 3 + 2 * tile, mask=exists, other=0)
    end = tl.load(offsets + expert + 1, mask=exists, other=0)
    lane = tl.arange(0, BLOCK_M)
    taken = exists & (first + lane < end)
    pair = tl.load(pairs + first + lane, mask=taken, other=-1)
    row = tile * BLOCK_M + lane
    tl.store(index + row, pair)
    tl.store(row_experts + row, expert + tl.zeros([BLOCK_M], dtype=tl.int32))
    tl.store(positions + pair, row, mask=taken)


@triton.jit
def local_ids_kernel(
    ids,
    expert_map,
    out,
    num_pairs,
    num_ids,
    num_experts,
    none,
    HAS_MAP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the local expert number of ids[p] in out[p], or ``none``."""
    begin_pdl(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < num_pairs
    expert = local_expert(ids, expert_map, pair, inside, num_ids, num_experts, HAS_MAP)
    tl.store(out + pair, tl.where(expert >= 0, expert, none), mask=inside)
