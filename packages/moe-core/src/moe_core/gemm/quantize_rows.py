"""Start the kernels of `moe_core.gemm.scaled_mm` that work on whole rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_core.gemm import scaled_mm
from moe_core.gemm.launch import Routing
from moe_core.jit.launch import launch
from moe_core.ops.batch import Batch, BatchedRows
from moe_core.ops.sort import SortedPairs, whole_row

#: which rows count: (name, arguments) of `scaled_mm.rows_in_use`
InUse = tuple[str, tuple[Any, ...]]


def routed_tokens(routing: Routing) -> InUse:
    """Tokens that have a local expert."""
    return "tokens", (routing.ids, routing.expert_map, routing.top_k, routing.num_ids, routing.num_experts)


def routed_pairs(routing: Routing | Batch) -> InUse:
    """Rows by pair that have a local expert."""
    if isinstance(routing, Batch):
        raise TypeError("the rows of a batch are no pairs")
    return "pairs", (routing.ids, routing.expert_map, 1, routing.num_ids, routing.num_experts)


def ordered_rows(order: SortedPairs | BatchedRows, routing: Routing | Batch) -> InUse:
    """Rows of the sorted order, or of a batch, that exist."""
    if isinstance(routing, Batch):
        return "batched", (order.offsets, routing.capacity)
    return "sorted", (order.offsets[routing.num_experts :],)


def find_amax(x: Tensor, amax: Tensor, in_use: InUse, *, pdl: bool) -> None:
    """Raise ``amax`` [1] int32, zeroed, to the bits of the largest magnitude of rows of ``x`` [R, C] in use."""
    count, columns = x.shape
    block_c = min(whole_row(columns), 2048)
    block_r = 2048 // block_c
    across = -(-columns // block_c)
    launch(
        scaled_mm.amax_kernel,
        (min(-(-count // block_r), max(1056 // across, 1)), across),
        x,
        amax,
        in_use[1],
        count,
        columns,
        x.stride(0),
        IN_USE=in_use[0],
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        pdl=pdl,
        num_warps=4,
    )


def quantize_rows(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    quantize: Any,
    arguments: tuple[Any, ...] | None,
    in_use: InUse,
    *,
    pdl: bool,
) -> None:
    """Rows of ``x`` [R, C] in use to ``values`` [R, width] and ``scales`` [R]; columns from C on become zeros."""
    count, columns = x.shape
    width = values.shape[1]
    block_c = whole_row(width)
    block_r = max(4096 // block_c, 1)
    launch(
        scaled_mm.quantize_rows_kernel,
        (-(-count // block_r),),
        x,
        values,
        scales,
        arguments,
        in_use[1],
        count,
        columns,
        width,
        x.stride(0),
        values.stride(0),
        quantize=quantize,
        IN_USE=in_use[0],
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        pdl=pdl,
        num_warps=min(max(block_c // 1024, 4), 16),
    )
