"""Rows by expert with every expert's first row at a multiple of the tile height.

Grouped GEMMs of libraries want it so: each tile of rows belongs to one expert.  The tiles are those of
`moe_core.kernels.ops.sort`, so the number of rows is bounded by shapes alone: CUDA-graph safe, no host synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import max_tiles
from moe_core.kernels.ops.sort import sort_pairs, sort_workspaces
from moe_core.spec.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class AlignedRows:
    """Where the (token, slot) pairs are among R rows.

    - ``index`` [R] int32: the pair token * k + slot of each row, -1 for rows of none
    - ``row_experts`` [R] int32: the expert of each row's tile, -1 behind the last tile in use
    - ``positions`` [M * k] int32: the row of each pair; not written for pairs of no local expert
    - ``count`` [1] int32: rows of the tiles in use
    """

    index: Tensor
    row_experts: Tensor
    positions: Tensor
    count: Tensor


def aligned_rows(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most rows that ``num_pairs`` pairs over ``num_experts`` experts can need."""
    return max_tiles(num_pairs, num_experts, block_m) * block_m


def align_workspaces(num_pairs: int, num_experts: int, block_m: int) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `align_pairs` for at most ``num_pairs`` pairs."""
    rows = aligned_rows(num_pairs, num_experts, block_m)
    return (
        *sort_workspaces(num_pairs, num_experts, block_m),
        WorkspaceSpec("align_index", (rows,), torch.int32),
        WorkspaceSpec("align_experts", (rows,), torch.int32),
        WorkspaceSpec("align_positions", (num_pairs,), torch.int32),
        WorkspaceSpec("align_count", (1,), torch.int32),
    )


def align_pairs(
    topk_ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    workspace: Mapping[str, Tensor],
    expert_map: Tensor | None = None,
) -> AlignedRows:
    """Sort ``topk_ids`` [M, k] (int32 or int64, contiguous) by local expert into tiles of ``block_m`` rows.

    An id that selects no local expert (see `moe_core.kernels.ops.sort`) has no row.  ``block_m`` is a power of two.
    """
    from moe_core.kernels.ops._align_kernels import align_kernel

    pairs = topk_ids.numel()
    rows = aligned_rows(pairs, num_experts, block_m)
    order = sort_pairs(topk_ids, num_experts, block_m, workspace=workspace, expert_map=expert_map)
    aligned = AlignedRows(
        workspace["align_index"][:rows],
        workspace["align_experts"][:rows],
        workspace["align_positions"][:pairs],
        workspace["align_count"],
    )
    launch(
        align_kernel,
        (rows // block_m,),
        order.tiles,
        order.offsets,
        order.pairs,
        aligned.index,
        aligned.row_experts,
        aligned.positions,
        aligned.count,
        BLOCK_M=block_m,
        num_warps=4,
    )
    return aligned


def local_ids(
    topk_ids: Tensor,
    num_experts: int,
    out: Tensor,
    *,
    none: int = -1,
    expert_map: Tensor | None = None,
) -> Tensor:
    """``topk_ids`` [M, k] (int32 or int64, contiguous) as ids of local experts, in ``out`` [M, k] int32.

    An id that is negative, at least the number of global experts, or mapped by ``expert_map`` [E global] to no local
    expert becomes ``none``: for libraries that take one contiguous range of experts, or trust their input.
    """
    from moe_core.kernels.ops._align_kernels import local_ids_kernel

    pairs = topk_ids.numel()
    block = 1024
    launch(
        local_ids_kernel,
        (-(-pairs // block),),
        topk_ids,
        expert_map,
        out,
        pairs,
        num_experts if expert_map is None else expert_map.numel(),
        num_experts,
        none,
        HAS_MAP=expert_map is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
