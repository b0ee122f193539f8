"""The k loop of one consumer in `moe_core.gemm.hopper`, for activations with zero points."""

from __future__ import annotations

from moe_core.hopper_api import accumulate_int8, column_scales, marked_rows, row_scales
from moe_core.kernel_api import scale_and_zero
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def multiply_integer_rows_zero(
    turn,
    row,
    expert,
    block_n,
    a_args,
    b_args,
    a_tiles,
    b_tiles,
    full,
    empty,
    steps,
    N,
    layout: gl.constexpr,
    WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """As `scaled_mm_int8`; A's scales are int64, B ends with sums of rows [E, rows] and their expert stride."""
    b_scale, stride_expert, stride_half, stride_column, sums, sums_expert = b_args
    # the sums start at what the zero points take away: behind the loop no registers are left for it
    row_scale, zero = scale_and_zero(row_scales(row, expert, a_args))
    row_scale = marked_rows(row_scale, row, a_args)
    sum_0, sum_1 = column_scales(expert, block_n, (sums, sums_expert, N, 1), N, layout, GATED)
    acc_0 = -zero[:, None] * sum_0[None, :]
    acc_1 = -zero[:, None] * sum_1[None, :]
    columns = (b_scale, stride_expert, stride_half, stride_column)
    scale_0, scale_1 = column_scales(expert, block_n, columns, N, layout, GATED)
    acc_0, acc_1, turn = accumulate_int8(
        turn, acc_0, acc_1, a_tiles, b_tiles, full, empty, steps, WARPGROUP, STAGES, gl.constexpr(False)
    )
    product_0 = acc_0.to(gl.float32) * (row_scale[:, None] * scale_0[None, :])
    product_1 = acc_1.to(gl.float32) * (row_scale[:, None] * scale_1[None, :])
    return product_0, product_1, turn
