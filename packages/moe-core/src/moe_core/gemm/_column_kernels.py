"""The kernel of `columns`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.schedule import expert_of
from moe_core.jit.casts import downcast
from moe_core.jit.pdl import begin_pdl


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
    """Program (pair, block of columns); see `columns.gather_columns`."""
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
    # zeros fill up the row
    tl.store(out + pair * stride_out + column, value, mask=column < stride_out)
