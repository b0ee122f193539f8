"""The k loop of one consumer in `moe_core.gemm.hopper`, where scales do not change along k.

It returns the scaled float32 products [64, 128] of both blocks, and the number of steps that were taken so far.

    a_args = (scales, whether each row has one or None: each expert, marks of rows or None: see `gemm.scaled_mm.marked`)
    b_args = (scales, stride per expert, per half of a gated product, per column)

with strides of 0 where the scale is the same.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moe_core.gemm.hopper_pipeline import HALF, TILE, barrier


@gluon.jit
def column_scales(expert, block_n, b_args, N, layout: gl.constexpr, GATED: gl.constexpr):
    """What belongs to the columns [128] of both blocks."""
    b_scale, stride_expert, stride_half, stride_column = b_args
    column = block_n * (TILE if GATED else 2 * TILE) + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
    # beyond the last column: any scale
    scales = b_scale + expert.to(gl.int64) * stride_expert
    scale_0 = gl.load(scales + gl.minimum(column, N - 1) * stride_column)
    if GATED:
        scale_1 = gl.load(scales + stride_half + gl.minimum(column, N - 1) * stride_column)
    else:
        scale_1 = gl.load(scales + gl.minimum(column + TILE, N - 1) * stride_column)
    return scale_0, scale_1


@gluon.jit
def row_scales(row, expert, a_args):
    """Scales of the rows; marks are `marked_rows`' matter where scales hold zero points too."""
    a_scale, by_row, marks = a_args
    if by_row is None:
        return gl.load(a_scale + expert + gl.zeros_like(row))
    else:
        return gl.load(a_scale + row)


@gluon.jit
def marked_rows(scale, row, a_args):
    """The rows' scales, NaN for those that are marked."""
    marks = a_args[2]
    if marks is not None:
        scale = gl.where(gl.load(marks + row) > 0x7F800000, float("nan"), scale)
    return scale


@gluon.jit
def accumulate_int8(
    turn,
    acc_0,
    acc_1,
    a_tiles,
    b_tiles,
    full,
    empty,
    steps,
    WARPGROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ZERO: gl.constexpr,
):
    """acc + the sums over all steps in int32, exact, and the number of steps taken so far; ZERO: acc are zeros.

    Triton has no integer instruction of 256 columns: two of 128.
    """
    for k in range(steps):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        a = a_tiles.index(slot).slice(WARPGROUP * HALF, HALF, 0)
        b = b_tiles.index(slot)
        acc_0 = warpgroup_mma(
            a, b.slice(0, TILE, 0).permute((1, 0)), acc_0, use_acc=(k > 0) if ZERO else True, is_async=True
        )
        acc_1 = warpgroup_mma(
            a, b.slice(TILE, TILE, 0).permute((1, 0)), acc_1, use_acc=(k > 0) if ZERO else True, is_async=True
        )
        # the two products of the step before are done: its slot is free
        acc_0, acc_1 = warpgroup_mma_wait(2, deps=[acc_0, acc_1])
        barrier()
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=k > 0)
        turn += 1
    acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
    barrier()
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
    return acc_0, acc_1, turn


@gluon.jit
def scaled_mm_e4m3(
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
    """e4m3: summed in the tensor cores, in float32, scaled once."""
    wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 32])
    scale_0, scale_1 = column_scales(expert, block_n, b_args, N, layout, GATED)
    row_scale = row_scales(row, expert, a_args)
    acc = gl.zeros([HALF, 2 * TILE], gl.float32, wide)
    for k in range(steps):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        a = a_tiles.index(slot).slice(WARPGROUP * HALF, HALF, 0)
        acc = warpgroup_mma(a, b_tiles.index(slot).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        # the step before this one is done: its slot is free
        acc = warpgroup_mma_wait(1, deps=[acc])
        barrier()
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), pred=k > 0)
        turn += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES))
    acc_0, acc_1 = acc.reshape([HALF, 2, TILE]).permute([0, 2, 1]).split()
    acc_0 = gl.convert_layout(acc_0, layout, assert_trivial=True) * row_scale[:, None] * scale_0[None, :]
    acc_1 = gl.convert_layout(acc_1, layout, assert_trivial=True) * row_scale[:, None] * scale_1[None, :]
    return acc_0, acc_1, turn


@gluon.jit
def scaled_mm_int8(
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
    """int8: summed in int32, exactly, scaled once."""
    scale_0, scale_1 = column_scales(expert, block_n, b_args, N, layout, GATED)
    row_scale = marked_rows(row_scales(row, expert, a_args), row, a_args)
    acc_0 = gl.zeros([HALF, TILE], gl.int32, layout)
    acc_1 = gl.zeros([HALF, TILE], gl.int32, layout)
    acc_0, acc_1, turn = accumulate_int8(
        turn, acc_0, acc_1, a_tiles, b_tiles, full, empty, steps, WARPGROUP, STAGES, gl.constexpr(True)
    )
    product_0 = acc_0.to(gl.float32) * (row_scale[:, None] * scale_0[None, :])
    product_1 = acc_1.to(gl.float32) * (row_scale[:, None] * scale_1[None, :])
    return product_0, product_1, turn
