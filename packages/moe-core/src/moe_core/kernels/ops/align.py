"""Pairs sorted by expert, with the first row of each expert aligned to the tile height.

Grouped GEMMs of libraries require this layout: each tile of rows belongs to one expert. The tiles are those of
`moe_core.kernels.ops.sort`, so shapes alone bound the number of rows. This is safe under CUDA-graph capture and needs
no host synchronization.
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
    """Assignment of the (token, slot) pairs to R rows.

    Attributes:
        index: Pair token * k + slot of each row [R], int32; -1 for padding rows.
        row_experts: Expert of each row's tile [R], int32; -1 after the last valid tile.
        positions: Row of each pair [M * k], int32; not written for pairs without a local expert.
        count: Number of rows in valid tiles [1], int32.
    """

    index: Tensor
    row_experts: Tensor
    positions: Tensor
    count: Tensor


def aligned_rows(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the largest number of rows that the aligned layout can need.

    Args:
        num_pairs: Number of pairs.
        num_experts: Number of experts.
        block_m: Rows per tile.

    Returns:
        Upper bound of the number of rows.
    """
    return max_tiles(num_pairs, num_experts, block_m) * block_m


def align_workspaces(num_pairs: int, num_experts: int, block_m: int) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of `align_pairs`.

    Args:
        num_pairs: Largest number of pairs.
        num_experts: Number of local experts.
        block_m: Rows per tile.

    Returns:
        Specifications of the tensors that `align_pairs` takes as ``workspace``.
    """
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
    """Sort the pairs of a routed batch by local expert into aligned tiles.

    An id that selects no local expert (see `moe_core.kernels.ops.sort`) gets no row.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        num_experts: Number of local experts.
        block_m: Rows per tile, a power of two.
        workspace: Tensors of `align_workspaces`, by name.
        expert_map: Local expert number of each global id.

    Returns:
        The rows, views of ``workspace``.
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
    """Map expert ids to local expert numbers, with one marker for ids without one.

    This is for libraries that support only one contiguous range of experts, or that do not validate their input.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        num_experts: Number of local experts.
        out: Output [M, k], int32.
        none: Marker for ids that are negative, too large, or mapped to no local expert.
        expert_map: Local expert number of each global id [E global].

    Returns:
        ``out``.
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
