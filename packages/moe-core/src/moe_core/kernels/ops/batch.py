"""Tiles of the batched activation format, in which rows arrive grouped by expert.

    rows      [E * T_max, K]  row r of expert e is e * T_max + r; the first counts[e] of them are valid
    offsets   [E + 1] int32   offsets[e + 1] is the row after the last valid one of expert e; offsets[0] is not set
    tiles     [2 + 2T] int32  as `moe_core.kernels.ops.sort` writes them: tiles[0] tiles of block_m rows; expert and
                              first row of tile t are tiles[2 + 2t] and tiles[3 + 2t]; T = `Batch.max_tiles`

Counts stay on the device: sizes depend on shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops.sort import QuantizeRows, RowsForKernels, Schedule
from moe_core.spec.workspace import WorkspaceSpec


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows in the batched format.

    Attributes:
        counts: Valid rows of each local expert [E], int32.
        capacity: Rows per expert, T_max.
    """

    counts: Tensor
    capacity: int
    #: router weights are not applied in this format
    weights: ClassVar[None] = None
    weight_on_input: ClassVar[bool] = False

    @property
    def num_experts(self) -> int:
        """Number of local experts."""
        return self.counts.numel()

    @property
    def num_pairs(self) -> int:
        """Number of rows in all buffers, valid or not."""
        return self.num_experts * self.capacity

    @property
    def top_k(self) -> int:
        """Slots per row."""
        return 1

    @property
    def in_use(self) -> tuple[str, tuple[Any, ...]]:
        """IN_USE and row_args of `moe_core.kernels.gemm.tiles.schedule.expert_of`."""
        return "batched", (self.counts, self.capacity)

    def max_tiles(self, block_m: int) -> int:
        """Return the largest possible number of tiles.

        Args:
            block_m: Rows per tile.

        Returns:
            Upper bound of the number of tiles.
        """
        return self.num_experts * -(-self.capacity // block_m)


def batch_workspaces(num_experts: int, capacity: int, block_m: int) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of `batch_rows`.

    Args:
        num_experts: Number of local experts.
        capacity: Rows per expert, T_max.
        block_m: Smallest number of rows per tile.

    Returns:
        Specifications of the tensors that `batch_rows` takes as ``workspace``.
    """
    tiles = num_experts * -(-capacity // block_m)
    return (
        WorkspaceSpec("batch_tiles", (2 + 2 * tiles,), torch.int32),
        WorkspaceSpec("batch_offsets", (num_experts + 1,), torch.int32),
    )


def batch_rows(
    batch: Batch,
    block_m: int,
    *,
    workspace: Mapping[str, Tensor],
    rows: QuantizeRows | None = None,
    zero: Tensor | None = None,
    pdl: bool = False,
) -> Schedule:
    """List the tiles of a batch, and optionally quantize its rows, in one launch.

    Args:
        batch: The batch. Its counts must be between 0 and T_max; this is not checked.
        block_m: Rows per tile.
        workspace: Tensors of `batch_workspaces`, by name.
        rows: Rows to quantize in the same launch, x [E * T_max, K].
        zero: Tensor (int32, contiguous) to fill with zeros.
        pdl: Use programmatic dependent launch.

    Returns:
        The schedule, views of ``workspace``.
    """
    import triton

    from moe_core.kernels.ops._batch_kernels import batch_kernel

    found = Schedule(workspace["batch_tiles"], workspace["batch_offsets"], None, block_m)
    block_g, row_warps = (1, 4) if rows is None else rows.block(512)
    experts = batch.num_experts
    launch(
        batch_kernel,
        (experts + (0 if rows is None else triton.cdiv(rows.num_groups, block_g)),),
        batch.counts,
        found.tiles,
        found.offsets,
        experts,
        batch.capacity,
        block_m,
        zero,
        0 if zero is None else zero.numel(),
        RowsForKernels() if rows is None else rows.for_kernels,
        0 if rows is None else rows.x.shape[0],
        BLOCK_E=max(triton.next_power_of_2(experts), 16),
        BLOCK_G=block_g,
        pdl=pdl,
        num_warps=row_warps,
    )
    return found
