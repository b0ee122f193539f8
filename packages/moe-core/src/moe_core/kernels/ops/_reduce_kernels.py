"""Kernel of `moe_core.kernels.ops.reduce`: the sum over top-k."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import downcast
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.ops._sort_kernels import local_expert


@triton.jit
def reduce_kernel(
    y,
    ids,
    expert_map,
    weights,
    rows,
    out,
    columns,
    num_ids,
    num_experts,
    stride_y,
    stride_out,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the weighted sum over the top-k slots of each token.

    out[m] = sum over j of weights[m, j] * y[m * TOP_K + j] (of its SPLIT_K parts), in float32, j ascending. Dropped
    pairs add nothing. With rows, pair p is row rows[p] of y.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    ends = ()
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
        # a dropped pair has no columns
        ends += (tl.where(expert >= 0, columns, 0),)
    # ids are older than the launch that produces y
    begin_pdl(PDL)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        # the weight of a dropped pair is arbitrary, possibly NaN
        weight = tl.load(weights + pair, mask=ends[j] > 0, other=0.0) if HAS_WEIGHTS else 1.0
        place = pair
        if rows is not None:
            place = tl.load(rows + pair, mask=ends[j] > 0, other=0).to(tl.int64)
        for part in tl.static_range(SPLIT_K):
            row = y + (place * SPLIT_K + part) * stride_y
            total += weight * tl.load(row + column, mask=column < ends[j], other=0.0).to(tl.float32)
    tl.store(out + token * stride_out + column, downcast(total, out.dtype.element_ty), mask=inside)
