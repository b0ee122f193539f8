"""Group the M * k (token, slot) pairs of a routed batch by expert.

    pairs     [P] int32       pair numbers token * k + slot, grouped by expert, ascending within an expert;
                              entries beyond offsets[E] are not written
    offsets   [E + 1] int32   rows of expert e are offsets[e] .. offsets[e + 1]
    tiles     [2 + 2T] int32  tiles[0] tiles of block_m rows; tile t belongs to expert tiles[2 + 2t], its first row is
                              tiles[3 + 2t]; T = `max_tiles`; tiles[1] is 0, for a kernel that counts what it has given
                              to its programs
    positions [P] int32       the inverse of pairs, on request; not written for pairs of no group

Nothing is padded and no data is moved.  A pair whose id is negative, beyond the number of experts or mapped to -1 by
`expert_map` is in no group.  The order is the same on every run.  Sizes depend on shapes alone: CUDA-graph safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import max_tiles, power_of_two
from moe_core.spec.workspace import WorkspaceSpec

#: above this many pairs experts are counted by a launch of their own instead of by every program
_COUNT_PAIRS = 2048
#: up to this many pairs each expert has a program that compares all pairs
_TINY_PAIRS = 64
#: pairs that a program sorts at a time: in one launch, in two at least, and at most
_BLOCK_PAIRS = (128, 256, 512)
#: most chunks that pairs are cut into: the second launch adds the counts of all of them in every program
_MAX_CHUNKS = 128


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rows that are grouped by expert; see the module docstring.  ``pairs`` None: `moe_core.kernels.ops.batch`."""

    tiles: Tensor
    offsets: Tensor
    pairs: Tensor | None
    block_m: int
    positions: Tensor | None = None

    @property
    def for_kernels(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """`schedule` of the kernels, see `moe_core.kernels.gemm.tiles.schedule`."""
        return self.tiles, self.offsets, self.pairs


@dataclass(frozen=True, eq=False)
class SortedPairs(Schedule):
    """The schedule of pairs."""

    pairs: Tensor


@dataclass(frozen=True, eq=False)
class QuantizeRows:
    """Rows to quantise in the launch that sorts: `x` [M, K] to `values` [M, K padded] and `scales` [M, groups].

    ``quantize`` is a `@triton.jit` function as `moe_core.kernels.gemm.tiles.tile_kernel` describes it, ``arguments``
    are its `quant_args`, ``group`` its group size: a power of two; `whole_row` of K for one scale per row.  Columns
    from K to the width of ``values`` become zeros.  Without ``values`` the scales alone are kept.
    """

    x: Tensor
    values: Tensor | None
    scales: Tensor | None
    quantize: Any
    group: int
    arguments: tuple[Any, ...] | None = None

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.x.shape[1] if self.values is None else self.values.shape[1]

    @property
    def num_groups(self) -> int:
        """Groups of all rows."""
        return self.x.shape[0] * -(-self.width // self.group)

    @property
    def for_kernels(self) -> RowsForKernels:
        """All but the number of rows, for which kernels are not compiled anew."""
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
        """(groups of one program, warps) that spread the work over about so many programs."""
        fewest = 4 if self.group <= 128 else 1
        most = max(4096 // self.group, 1)
        share = 1 << max(-(-self.num_groups // programs) - 1, 0).bit_length()
        return max(min(share, most), fewest), 4 if self.group <= 4096 else 8


class RowsForKernels(NamedTuple):
    """`QuantizeRows` as kernels get it, without ``quantize`` where there are none.

    ``out`` are its values; ``even``: rows of the result are whole groups; ``single``: those of x have one column.
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
    """The ``group`` of `QuantizeRows` that spans a row."""
    return power_of_two(columns)


def sort_workspaces(num_pairs: int, num_experts: int, block_m: int) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `sort_pairs` for at most ``num_pairs`` pairs and tiles of at least ``block_m`` rows."""
    tiles = max_tiles(num_pairs, num_experts, block_m)
    return (
        WorkspaceSpec("sort_tiles", (2 + 2 * tiles,), torch.int32),
        WorkspaceSpec("sort_offsets", (num_experts + 1,), torch.int32),
        WorkspaceSpec("sort_pairs", (num_pairs,), torch.int32),
        WorkspaceSpec("sort_counts", (num_experts * min(-(-num_pairs // _BLOCK_PAIRS[1]), _MAX_CHUNKS),), torch.int32),
        WorkspaceSpec("sort_positions", (num_pairs,), torch.int32),
    )


def clears_first(num_pairs: int) -> bool:
    """Whether `sort_pairs` takes two launches, so that what the first has cleared may be added to by the second."""
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
    """Sort ``topk_ids`` [M, k] (int32 or int64, contiguous) with the Triton kernel.

    ``num_experts`` local experts; ``expert_map`` [E] int32 gives the local number of a global id; ``positions``
    asks for the inverse too; ``zero`` (int32, contiguous) is filled with zeros, before ``rows`` are quantised where
    `clears_first` says so.
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
    """The torch twin of `sort_pairs`: same result, exact sizes, positions of pairs of no group -1, any device."""
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
