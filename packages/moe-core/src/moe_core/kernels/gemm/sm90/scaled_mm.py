"""The mainloop of `moe_core.kernels.gemm.sm90.kernel` for scales constant along k.

This is the loop of one consumer.

    a_args = (scales, per_row, nan_flags)
    b_args = (scales, stride per expert, per half of a gated GEMM, per column)

`per_row` is None if each expert has a scale; otherwise each row has one. `nan_flags` of rows may be None, see
`moe_core.kernels.gemm.tiles.scaled_mm.scale_or_nan`. Strides are 0 where the scale is the same. Scales of A with zero
points are int64 (`moe_core.kernels.gemm.tiles.scaled_mm.with_zero`). b_args then ends with the sums of the weights'
rows [E, rows] int32 and their expert stride.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_core.kernels.gemm.sm90.pipeline import HALF, LAYOUT, TILE, free_slot, wait_for_slot
from moe_core.kernels.gemm.tiles.scaled_mm import scale_and_zero, scale_or_nan


@gluon.jit
def _of_columns(pointer, stride_half, stride_column, block_n, N, GATED: gl.constexpr):
    """Values for the columns [128] of both blocks, one per thread; see `_spread`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = block_n * (TILE if GATED else 2 * TILE) + gl.arange(0, TILE, layout=layout)
    # Beyond the last column any scale will do.
    found = gl.load(pointer + gl.minimum(column, N - 1) * stride_column)
    if GATED:
        pointer += stride_half
    else:
        column += TILE
    return found, gl.load(pointer + gl.minimum(column, N - 1) * stride_column)


@gluon.jit
def _spread(columns):
    """Distribute [128] of `_of_columns` to the threads that hold the accumulator's columns.

    This goes through shared memory instead of 32 loads.
    """
    return gl.convert_layout(columns, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def prefetch(row, expert, block_n, a_args, b_args, N, GATED: gl.constexpr):
    """(row scales [64], column scales [128] of both blocks[, sums of their weights]).

    The sums are loaded with zero points.
    """
    a_scales, by_row, nan_flags = a_args
    place = row
    if by_row is None:
        place = expert + gl.zeros_like(row)
    row_scale = gl.load(a_scales + place)
    scales = b_args[0] + expert.to(gl.int64) * b_args[1]
    found = (row_scale,) + _of_columns(scales, b_args[2], b_args[3], block_n, N, GATED)
    if row_scale.dtype == gl.int64:
        sums = b_args[4] + expert.to(gl.int64) * b_args[5]
        found += _of_columns(sums, N, 1, block_n, N, GATED)
    return found


@gluon.jit
def scaled_mm(
    turn, ahead, row, expert, block_n, a_args, b_args, ring, steps, N, WARPGROUP: gl.constexpr, GATED: gl.constexpr
):
    """(scaled float32 accumulators [64, 128] of both blocks, number of steps so far).

    ahead: result of `prefetch`. int8 is summed exactly in int32 and scaled once; e4m3 is summed in float32, in the
    tensor cores.
    """
    INT8: gl.constexpr = ring[0].dtype == gl.int8
    row_scale = ahead[0]
    ZERO: gl.constexpr = row_scale.dtype == gl.int64
    if ZERO:
        # The sums start at the zero points' correction: after the loop no registers are left for it.
        row_scale, zero = scale_and_zero(row_scale)
        acc = (-zero[:, None] * _spread(ahead[3]), -zero[:, None] * _spread(ahead[4]))
    elif INT8:
        acc = (gl.zeros([HALF, TILE], gl.int32, LAYOUT), gl.zeros([HALF, TILE], gl.int32, LAYOUT))
    else:
        WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32])
        acc = gl.zeros([HALF, 2 * TILE], gl.float32, WIDE)
    row_scale = scale_or_nan(row_scale, a_args[2], row)
    for k in range(steps):
        a, b = wait_for_slot(ring, turn, WARPGROUP)
        more = True if ZERO else k > 0
        if INT8:
            # Triton has no integer instruction of 256 columns: use two of 128.
            acc_0 = warpgroup_mma(a, b.slice(0, TILE, 0).permute((1, 0)), acc[0], use_acc=more, is_async=True)
            acc_1 = warpgroup_mma(a, b.slice(TILE, TILE, 0).permute((1, 0)), acc[1], use_acc=more, is_async=True)
            acc = warpgroup_mma_wait(2, deps=[acc_0, acc_1])
        else:
            acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=more, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
        # The previous step is done: free its stage.
        free_slot(ring, turn + ring[3].shape[0] - 1, k > 0)
        turn += 1
    acc = warpgroup_mma_wait(0, deps=acc if INT8 else [acc])
    free_slot(ring, turn + ring[3].shape[0] - 1, True)
    if INT8:
        acc_0 = acc[0].to(gl.float32) * (row_scale[:, None] * _spread(ahead[1]))
        acc_1 = acc[1].to(gl.float32) * (row_scale[:, None] * _spread(ahead[2]))
    else:
        acc_0, acc_1 = acc.reshape([HALF, 2, TILE]).permute([0, 2, 1]).split()
        acc_0 = gl.convert_layout(acc_0, LAYOUT, assert_trivial=True) * row_scale[:, None] * _spread(ahead[1])
        acc_1 = gl.convert_layout(acc_1, LAYOUT, assert_trivial=True) * row_scale[:, None] * _spread(ahead[2])
    return acc_0, acc_1, turn
