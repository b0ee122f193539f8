"""The split-K reduction of gemm1: the sum of the partial sums, then the epilogue of `moe_core.gemm.tile_kernel`."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.schedule import expert_of
from moe_core.gemm.tile_kernel import finish_tile
from moe_core.jit.pdl import begin_pdl


@triton.jit
def _sum_partials(partials, columns, inside, stride, SPLIT_K: tl.constexpr):
    index = tl.arange(0, SPLIT_K)
    tile = tl.load(partials + index[:, None] * stride + columns[None, :], mask=inside[None, :], other=0.0)
    return tl.sum(tile, axis=0)[None, :]


@triton.jit
def split_k_reduce_kernel(
    partials,
    routing,
    epilogue,
    result,
    N,
    stride_partials,
    SPLIT_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """`block` columns of one pair, a tile of one row; partials [pairs * SPLIT_K, N or 2N] float32; routing: `row_args`.

    The grid is (pairs, blocks of columns).
    """
    begin_pdl(PDL)
    pair = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    expert = expert_of(pair, pair >= 0, routing, "pairs")
    if expert < 0:
        return
    columns = block * result.block + tl.arange(0, result.block)
    inside = columns < N
    first = partials + pair * SPLIT_K * stride_partials
    value = _sum_partials(first, columns, inside, stride_partials, SPLIT_K)
    up = value
    if epilogue.gated:
        up = _sum_partials(first + N, columns, inside, stride_partials, SPLIT_K)
    one = tl.arange(0, 1)
    row = pair + one
    finish_tile(value, up, epilogue, result, N, expert, row, row, one == 0, block, columns, False, False)
