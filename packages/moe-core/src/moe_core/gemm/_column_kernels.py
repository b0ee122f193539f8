"""The kernel of `columns`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import downcast
from moe_core.ops._sort_kernels import local_expert


@triton.jit
def gather_kernel(
    x,
    out,
    ids,
    expert_map,
    index,
    factor,
    columns,
    limit,
    num_experts,
    stride_x,
    stride_out,
    stride_index,
    stride_factor,
    per_row,
    BATCHED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (pair, block of columns); see `columns.gather_columns`.  ``limit``: global ids, or rows of an expert."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    if BATCHED:
        expert = pair // limit
        if pair % limit >= tl.load(ids + expert):
            return
    else:
        expert = local_expert(ids, expert_map, pair, pair >= 0, limit, num_experts, expert_map is not None)
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
    # zeros fill up the row
    tl.store(out + pair * stride_out + column, value, mask=column < stride_out)
