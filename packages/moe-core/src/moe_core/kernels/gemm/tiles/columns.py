"""Weight columns reordered by quantization group, and activations gathered to match.

With an activation order, a column may belong to any group. At load time the columns of each expert are sorted by group.
At run time its activations are gathered in that order, which is exact for any groups. Where group sizes differ from the
key's (in a shard of a matrix), each group is padded to a multiple of a smaller group size, and all smaller groups get
their own scales. The MMAs then read single columns, which is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_core.kernels.device.casts import downcast
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.gemm.tiles.launch import Routing
from moe_core.kernels.gemm.tiles.schedule import expert_of
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops.batch import Batch

#: Columns of the smaller groups.
CHUNK = 32


@dataclass(frozen=True, eq=False)
class Grouped:
    """Columns in the order of their groups.

    Attributes:
        index: int32 [E, columns], the source column at each position; -1 for padding.
        group_size: Number of consecutive columns that share a group.
        groups: int64 [E, ceil(columns / group_size)], the group of each run of columns.
    """

    index: Tensor
    group_size: int
    groups: Tensor


def group_columns(g_idx: Tensor, group_size: int, count: int) -> Grouped:
    """Sort the columns of each expert by group.

    This synchronizes with the device. Output sizes depend only on ``count`` and on whether all groups are whole.

    Args:
        g_idx: int32 [E, K], the group of each column.
        group_size: Number of columns that most groups have.
        count: Number of groups.

    Returns:
        The order, with groups of ``group_size`` if all groups are whole, otherwise with padded groups of `CHUNK`
        columns.
    """
    experts, columns = g_idx.shape
    device = g_idx.device
    order = torch.argsort(g_idx, dim=1, stable=True)
    chunk, places = CHUNK, (columns // CHUNK + count) * CHUNK
    sizes = torch.zeros(experts, count, dtype=torch.int64, device=device)
    sizes.scatter_add_(1, g_idx.long(), torch.ones_like(g_idx, dtype=torch.int64))
    if count == -(-columns // group_size):
        whole = torch.full_like(sizes[0], group_size)
        whole[-1] = columns - (count - 1) * group_size
        # Meta tensors have no values; groups of a real checkpoint are taken as whole.
        if g_idx.is_meta or bool((sizes == whole).all()):
            chunk, places = group_size, columns
    chunks = -(-sizes // chunk)
    ends = chunks.cumsum(dim=1)
    # The position of a column: the start of its group plus the number of the group's columns before it.
    before = sizes.cumsum(dim=1) - sizes
    group = g_idx.long().gather(1, order)
    within = torch.arange(columns, device=device) - before.gather(1, group)
    place = (ends - chunks).gather(1, group) * chunk + within
    index = torch.full((experts, places), -1, dtype=torch.int32, device=device)
    index.scatter_(1, place, order.int())
    number = torch.arange(-(-places // chunk), device=device).expand(experts, -1).contiguous()
    groups = torch.searchsorted(ends, number, right=True).clamp_max(count - 1)
    return Grouped(index, chunk, groups)


@dataclass(frozen=True, eq=False)
class Columns:
    """Order and pre-scales of activation columns that a weight requires.

    Attributes:
        k: Number of columns.
        index: int32 [E, k], the column of x at each position, -1 for zeros; None keeps the order.
        pre_scales: float32 [E, K] that multiply the columns of x, or None.
    """

    k: int
    index: Tensor | None = None
    pre_scales: Tensor | None = None

    def gathers(self, columns: int) -> bool:
        """Whether activations are gathered before the GEMM.

        Args:
            columns: Number of columns of the activations.

        Returns:
            True if columns are reordered or pre-scaled and none are padded.
        """
        return (self.index is not None or self.pre_scales is not None) and self.k == columns

    def indexes(self, columns: int) -> bool:
        """Whether the GEMM reads columns one by one, because groups were padded.

        Args:
            columns: Number of columns of the activations.

        Returns:
            True if the weight has another number of columns.
        """
        return self.k != columns


@triton.jit
def gather_kernel(
    x,
    out,
    row_args,
    index,
    factor,
    columns,
    stride_x,
    stride_out,
    stride_index,
    stride_factor,
    per_row,
    IN_USE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gather columns; program (pair, block of columns). See `gather_columns`."""
    begin_pdl(PDL)
    pair = tl.program_id(0).to(tl.int64)
    expert = expert_of(pair, pair >= 0, row_args, IN_USE)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    some = column < columns
    source = column
    if index is not None:
        source = tl.load(index + expert * stride_index + column, mask=some, other=-1)
        some = some & (source >= 0)
    value = tl.load(x + pair // per_row * stride_x + source, mask=some, other=0.0)
    if factor is not None:
        value = value.to(tl.float32) * tl.load(factor + expert * stride_factor + source, mask=some, other=0.0)
        value = downcast(value, out.dtype.element_ty)
    # Zeros pad the row.
    tl.store(out + pair * stride_out + column, value, mask=column < stride_out)


def gather_columns(
    x: Tensor, out: Tensor, columns: Columns, routing: Routing | Batch, *, by_token: bool, pdl: bool
) -> None:
    """Write out[pair, c] = x[row, index[expert, c]] * pre_scales[expert, index[expert, c]].

    Pairs without a local expert (batched: rows beyond those in use) are not written.

    Args:
        x: [rows, K], one row per token or pair.
        out: [pairs, at least k].
        columns: Order and pre-scales of the columns.
        routing: Routing, or the batch.
        by_token: Whether a row of ``x`` is a token; otherwise it is a pair (batched: a row).
        pdl: Whether the launch overlaps with its neighbors.
    """
    in_use, row_args = routing.in_use
    index, factor = columns.index, columns.pre_scales
    block = 1024
    launch(
        gather_kernel,
        (routing.num_pairs, -(-out.shape[1] // block)),
        x,
        out,
        row_args,
        index,
        factor,
        columns.k,
        x.stride(0),
        out.stride(0),
        0 if index is None else index.stride(0),
        0 if factor is None else factor.stride(0),
        routing.top_k if by_token else 1,
        IN_USE=in_use,
        BLOCK=block,
        pdl=pdl,
        num_warps=4,
    )
