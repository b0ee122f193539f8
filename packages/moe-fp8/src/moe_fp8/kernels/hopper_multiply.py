"""The k loop of one consumer in `moe_core.gemm.hopper`, with scales by block: 64 rows times two blocks of 128 columns.

It returns the scaled float32 products [64, 128] of both blocks, and the number of steps that were taken so far.
"""

from __future__ import annotations

from moe_core.gemm.epilogue import NAN
from moe_core.gemm.hopper_pipeline import HALF, TILE, barrier
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moe_fp8.kernels.block import FLOAT32_MAX


@gluon.jit
def multiply_blocks(
    turn,
    row,
    expert,
    block_n,
    A,
    B,
    a_tiles,
    b_tiles,
    full,
    empty,
    steps,
    N,
    layout: gl.constexpr,
    WHICH: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """One float32 scale per row and step, and per weight block: each step's product is added, scaled.

    A = (scales [P, steps], row stride), B = (scales [E, rows / 128, steps], expert stride, row stride).
    """
    a_scale, stride_a_scale = A
    b_scale, stride_b_scale_e, stride_b_scale_n = B
    scales = a_scale + row.to(gl.int64) * stride_a_scale
    first_scale = b_scale + expert.to(gl.int64) * stride_b_scale_e
    if GATED:
        first_scale += block_n * stride_b_scale_n
        second_scale = first_scale + gl.cdiv(N, TILE) * stride_b_scale_n
    else:
        first_scale += block_n * 2 * stride_b_scale_n
        # the second block may lie beyond the last column
        second_scale = first_scale + gl.where((block_n * 2 + 1) * TILE < N, stride_b_scale_n, 0)
    acc_0 = gl.zeros([HALF, TILE], gl.float32, layout)
    acc_1 = gl.zeros([HALF, TILE], gl.float32, layout)
    zero = gl.zeros([HALF, TILE], gl.float32, layout)
    row_scale = gl.load(scales)
    scale_0 = gl.load(first_scale)
    scale_1 = gl.load(second_scale)
    for k in range(steps):
        slot = turn % STAGES
        # never infinity: weights of zero may have any scale, and 0 * infinity is no number
        by_0 = gl.minimum(row_scale * scale_0, FLOAT32_MAX, propagate_nan=NAN)
        by_1 = gl.minimum(row_scale * scale_1, FLOAT32_MAX, propagate_nan=NAN)
        # for the next step; the last one reads its own again
        following = gl.minimum(k + 1, steps - 1)
        row_scale = gl.load(scales + following)
        scale_0 = gl.load(first_scale + following)
        scale_1 = gl.load(second_scale + following)
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        a = a_tiles.index(slot).slice(WHICH * HALF, HALF, 0)
        b = b_tiles.index(slot)
        product = warpgroup_mma(a, b.slice(0, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        acc_0 += product * by_0[:, None]
        product = warpgroup_mma(a, b.slice(TILE, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        barrier()  # all four warps have read the slot
        mbarrier.arrive(empty.index(slot))
        acc_1 += product * by_1[:, None]
        turn += 1
    return acc_0, acc_1, turn
