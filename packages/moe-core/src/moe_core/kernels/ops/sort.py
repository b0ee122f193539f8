"""Group the M * k (token, slot) pairs of a routed batch by expert.

    pairs     [P] int32       pair numbers token * k + slot, grouped by expert, ascending within an expert;
                              entries beyond offsets[E] are not written
    offsets   [E + 1] int32   rows of expert e are offsets[e] .. offsets[e + 1]
    tiles     [2 + 2T] int32  tiles[0]: number of tiles of block_m rows; tiles[1]: 0, a counter for kernels that
                              distribute tiles dynamically; tiles[2 + 2t], tiles[3 + 2t]: expert and first row of
                              tile t; T = `max_tiles`
    positions [P] int32       the inverse of pairs, on request; not written for pairs without a group

Nothing is padded and no data is moved. A pair is in no group if its id is negative, beyond the number of experts, or
mapped to -1 by `expert_map`. The order is the same on every run. Sizes depend on shapes alone, which makes the sort
safe under CUDA-graph capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import max_tiles, power_of_two
from moe_core.spec.workspace import WorkspaceSpec

#: above this number of pairs a separate launch counts the pairs per expert; below, every program counts them
_COUNT_PAIRS = 2048
#: up to this number of pairs there is one program per expert, which compares all pairs
_TINY_PAIRS = 64
#: pairs that a program sorts at a time: minimum with one launch, minimum with two launches, maximum
_BLOCK_PAIRS = (128, 256, 512)
#: largest number of chunks of pairs: every program of the second launch adds up the counts of all chunks
_MAX_CHUNKS = 128


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rows grouped by expert; see the module docstring.

    Attributes:
        tiles: Tiles [2 + 2T], int32.
        offsets: First row of each expert [E + 1], int32.
        pairs: Pair numbers [P], int32; None for the batched format (`moe_core.kernels.ops.batch`).
        block_m: Rows per tile.
        positions: Inverse of ``pairs`` [P], int32, if requested.
    """

    tiles: Tensor
    offsets: Tensor
    pairs: Tensor | None
    block_m: int
    positions: Tensor | None = None

    @property
    def for_kernels(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The kernels' `schedule` argument, see `moe_core.kernels.gemm.tiles.schedule`."""
        return self.tiles, self.offsets, self.pairs


@dataclass(frozen=True, eq=False)
class SortedPairs(Schedule):
    """Schedule whose rows are sorted pairs; ``pairs`` is always present."""

    pairs: Tensor


@dataclass(frozen=True, eq=False)
class QuantizeRows:
    """Rows to quantize in the launch that sorts.

    Columns from K to the width of ``values`` are filled with zeros.

    Attributes:
        x: Rows to quantize [M, K].
        values: Quantized rows [M, K padded]; None keeps only the scales.
        scales: Scales [M, groups], or None.
        quantize: A `@triton.jit` function as described in `moe_core.kernels.gemm.tiles.tile_kernel`.
        group: Group size, a power of two; `whole_row` of K for one scale per row.
        arguments: The `quant_args` of ``quantize``.
    """

    x: Tensor
    values: Tensor | None
    scales: Tensor | None
    quantize: Any
    group: int
    arguments: tuple[Any, ...] | None = None

    @cached_property
    def width(self) -> int:
        """Number of columns of the result."""
        return self.x.shape[1] if self.values is None else self.values.shape[1]

    @cached_property
    def num_groups(self) -> int:
        """Number of groups in all rows."""
        return self.x.shape[0] * -(-self.width // self.group)

    @property
    def for_kernels(self) -> RowsForKernels:
        """Kernel arguments except for the number of rows, on which kernels do not specialize."""
        x, values, scales = self.x, self.values, self.scales
        return RowsForKernels(
            x,
            values,
            scales,
            self.arguments,
            x.shape[1],
            self.width,
            x.stride(0),
            0 if values is None else values.stride(0),
            0 if scales is None else scales.stride(0),
            *_constants(self.quantize, self.group, self.width % self.group == 0, x.shape[1] == 1),
        )

    def block(self, programs: int) -> tuple[int, int]:
        """Choose the block that spreads the work over about ``programs`` programs.

        Args:
            programs: Desired number of programs.

        Returns:
            ``(groups, warps)`` per program.
        """
        fewest = 4 if self.group <= 128 else 1
        most = max(4096 // self.group, 1)
        share = 1 << max(-(-self.num_groups // programs) - 1, 0).bit_length()
        return max(min(share, most), fewest), 4 if self.group <= 4096 else 8


class RowsForKernels(NamedTuple):
    """`QuantizeRows` as a kernel argument; without ``quantize`` there are no rows.

    Attributes:
        x: Rows to quantize.
        out: The ``values`` of `QuantizeRows`.
        scales: Scales.
        arguments: The `quant_args` of ``quantize``.
        columns: Columns of ``x``.
        width: Columns of the result.
        stride_x: Row stride of ``x``.
        stride_out: Row stride of ``out``.
        stride_scales: Row stride of ``scales``.
        quantize: The quantization function.
        group: Group size.
        even: Whether a row of the result consists of whole groups.
        single: Whether rows of ``x`` have one column.
    """

    x: Tensor | None = None
    out: Tensor | None = None
    scales: Tensor | None = None
    arguments: tuple[Any, ...] | None = None
    columns: int = 0
    width: int = 0
    stride_x: int = 0
    stride_out: int = 0
    stride_scales: int = 0
    quantize: Any = None
    group: Any = None
    even: Any = None
    single: Any = None


@cache
def _constants(quantize: Any, group: int, even: bool, single: bool) -> tuple[Any, ...]:
    import triton.language as tl

    return quantize, tl.constexpr(group), tl.constexpr(even), tl.constexpr(single)


def whole_row(columns: int) -> int:
    """Return the ``group`` of `QuantizeRows` that spans a row.

    Args:
        columns: Columns of a row.

    Returns:
        The next power of two.
    """
    return power_of_two(columns)


def sort_workspaces(num_pairs: int, num_experts: int, block_m: int) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of `sort_pairs`.

    Args:
        num_pairs: Largest number of pairs.
        num_experts: Number of local experts.
        block_m: Smallest number of rows per tile.

    Returns:
        Specifications of the tensors that `sort_pairs` takes as ``workspace``.
    """
    tiles = max_tiles(num_pairs, num_experts, block_m)
    return (
        WorkspaceSpec("sort_tiles", (2 + 2 * tiles,), torch.int32),
        WorkspaceSpec("sort_offsets", (num_experts + 1,), torch.int32),
        WorkspaceSpec("sort_pairs", (num_pairs,), torch.int32),
        WorkspaceSpec("sort_counts", (num_experts * min(-(-num_pairs // _BLOCK_PAIRS[1]), _MAX_CHUNKS),), torch.int32),
        WorkspaceSpec("sort_positions", (num_pairs,), torch.int32),
    )


def clears_first(num_pairs: int) -> bool:
    """Report whether `sort_pairs` takes two launches.

    The second may then add to what the first has cleared.

    Args:
        num_pairs: Number of pairs.

    Returns:
        Whether there are two launches.
    """
    return num_pairs > _COUNT_PAIRS


def sort_pairs(
    topk_ids: Tensor,
    num_experts: int,
    block_m: int,
    *,
    workspace: Mapping[str, Tensor],
    expert_map: Tensor | None = None,
    rows: QuantizeRows | None = None,
    positions: bool = False,
    zero: Tensor | None = None,
    pdl: bool = False,
) -> SortedPairs:
    """Sort the pairs of a routed batch by local expert with the Triton kernel.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        num_experts: Number of local experts.
        block_m: Rows per tile.
        workspace: Tensors of `sort_workspaces`, by name.
        expert_map: Local expert number of each global id [E], int32.
        rows: Rows to quantize in the same launch.
        positions: Whether to write the inverse permutation too.
        zero: Tensor (int32, contiguous) to fill with zeros. Where `clears_first` is true, it is cleared before ``rows``
            are quantized.
        pdl: Use programmatic dependent launch.

    Returns:
        The sorted pairs, views of ``workspace``.
    """
    import triton

    from moe_core.kernels.ops._sort_kernels import COUNT, SCATTER, SORT, TINY, sort_kernel

    sorted_ = SortedPairs(
        workspace["sort_tiles"],
        workspace["sort_offsets"],
        workspace["sort_pairs"],
        block_m,
        workspace["sort_positions"] if positions else None,
    )
    pairs = topk_ids.numel()
    num_ids = num_experts if expert_map is None else expert_map.numel()
    tiny = pairs <= _TINY_PAIRS
    modes = (TINY,) if tiny else (COUNT, SCATTER) if clears_first(pairs) else (SORT,)
    share = triton.cdiv(pairs, _MAX_CHUNKS)
    if tiny:
        block_p = max(triton.next_power_of_2(pairs), 16)
    else:
        block_p = min(max(triton.next_power_of_2(share), _BLOCK_PAIRS[len(modes) - 1]), _BLOCK_PAIRS[2])
    chunk = triton.cdiv(share, block_p) * block_p
    sorters = num_experts if tiny else triton.cdiv(pairs, chunk)
    block_g, row_warps = (1, 4) if rows is None else rows.block(512)
    for mode in modes:
        job = rows if mode != COUNT else None
        cleared = zero if mode != SCATTER else None
        programs = sorters + (triton.cdiv(job.num_groups, block_g) if job is not None else 0)
        launch(
            sort_kernel,
            (programs,),
            topk_ids,
            expert_map,
            workspace["sort_counts"],
            sorted_.tiles,
            sorted_.offsets,
            sorted_.pairs,
            sorted_.positions,
            pairs,
            num_ids,
            num_experts,
            block_m,
            sorters,
            chunk,
            cleared,
            0 if cleared is None else cleared.numel(),
            RowsForKernels() if job is None else job.for_kernels,
            0 if job is None else job.x.shape[0],
            MODE=mode,
            HAS_MAP=expert_map is not None,
            BLOCK_P=block_p,
            BLOCK_COUNT=256 if pairs <= 256 else 1024,
            BLOCK_E=max(triton.next_power_of_2(num_experts), 32),
            BLOCK_G=block_g,
            pdl=pdl,
            num_warps=max(4 if block_p < 512 else 8, row_warps),
        )
    return sorted_


def sort_pairs_torch(
    topk_ids: Tensor, num_experts: int, block_m: int, *, expert_map: Tensor | None = None
) -> SortedPairs:
    """Compute `sort_pairs` in PyTorch, on any device.

    Args:
        topk_ids: As in `sort_pairs`.
        num_experts: As in `sort_pairs`.
        block_m: As in `sort_pairs`.
        expert_map: As in `sort_pairs`.

    Returns:
        The same result in tensors of exact size. Positions of pairs without a group are -1.
    """
    ids = topk_ids.flatten().long()
    num_ids = num_experts if expert_map is None else expert_map.numel()
    known = (ids >= 0) & (ids < num_ids)
    local = torch.where(known, ids, 0)
    if expert_map is not None:
        local = expert_map.long()[local]
        known &= (local >= 0) & (local < num_experts)
    kept = known.nonzero().flatten()
    order = torch.argsort(local[kept], stable=True)
    counts = torch.bincount(local[kept], minlength=num_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    starts = [(expert, start) for expert, count in enumerate(counts.tolist()) for start in range(0, count, block_m)]
    tiles = [len(starts), 0]
    for expert, start in starts:
        tiles += [expert, int(offsets[expert]) + start]
    device = topk_ids.device
    return SortedPairs(torch.tensor(tiles, dtype=torch.int32, device=device), offsets.int(), kept[order].int(), block_m)
