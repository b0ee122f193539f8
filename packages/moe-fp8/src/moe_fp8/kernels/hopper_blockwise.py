"""Block-scale mainloop of one consumer warp group in `moe_core.kernels.gemm.sm90.kernel`.

A consumer computes 64 rows times two blocks of 128 columns. There is one float32 scale per row and step, and one per
weight block, whose depth equals a step: each step's partial sum is scaled, then added. a_args = (scales [P, steps], row
stride), b_args = (scales [E, rows / block rows, steps], expert stride, row stride, rows per block as a constant).
"""

from __future__ import annotations

from moe_core.api.kernels import scale_product
from moe_core.api.sm90 import HALF, LAYOUT, TILE, free_slot, wait_for_slot
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def _scale_rows(block_n, stride, N, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Return the scale offsets of rows 0, 64, 128 and 192 of a tile's weights.

    Rows beyond the last column get an arbitrary valid offset.
    """
    PER_TILE: gl.constexpr = TILE // ROWS
    last = gl.cdiv(N, ROWS) - 1
    # the neighbor of a partial tile's last block may be entirely out of range
    first = gl.minimum(block_n * (PER_TILE if GATED else 2 * PER_TILE), last)
    found = (first * stride, gl.minimum(first + PER_TILE - 1, last) * stride)
    if GATED:
        up = (last + 1) * stride
        return found + (found[0] + up, found[1] + up)
    else:
        return found + (
            gl.minimum(first + PER_TILE, last) * stride,
            gl.minimum(first + 2 * PER_TILE - 1, last) * stride,
        )


@gluon.jit
def _scales(pointer, rows, k, ROWS: gl.constexpr):
    """Load step `k`'s scales of four quarters of the weight rows (two halves if ROWS is 128)."""
    scale_0 = gl.load(pointer + rows[0] + k)
    scale_2 = gl.load(pointer + rows[2] + k)
    if ROWS == TILE:
        return scale_0, scale_0, scale_2, scale_2
    else:
        return scale_0, gl.load(pointer + rows[1] + k), scale_2, gl.load(pointer + rows[3] + k)


@gluon.jit
def _factors(row_scale, low, high, ROWS: gl.constexpr):
    """Combine row scales with the column scales `low` (columns 0-63) and `high` (64-127).

    The result is [64, 128], or [64, 1] if all columns share `low`.
    """
    by_low = scale_product(row_scale, low)[:, None]
    if ROWS == TILE:
        return by_low
    else:
        by_high = scale_product(row_scale, high)[:, None]
        # The compiler knows which of the two each register needs.
        column = gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        return gl.where(column < TILE // 2, by_low, by_high)


@gluon.jit
def prefetch(row, expert, block_n, a_args, b_args, N, GATED: gl.constexpr):
    """Prefetch nothing: no registers are left to carry scales through an epilogue."""
    return ()


@gluon.jit
def scaled_mm_blockwise(
    turn, ahead, row, expert, block_n, a_args, b_args, ring, steps, N, WARPGROUP: gl.constexpr, GATED: gl.constexpr
):
    """Return the scaled float32 accumulators [64, 128] of both blocks and the updated step counter."""
    ROWS: gl.constexpr = b_args[3]
    scales = a_args[0] + row.to(gl.int64) * a_args[1]
    b_scales = b_args[0] + expert.to(gl.int64) * b_args[1]
    rows = _scale_rows(block_n, b_args[2], N, ROWS, GATED)
    zero = gl.zeros([HALF, TILE], gl.float32, LAYOUT)
    acc_0 = zero
    acc_1 = zero
    row_scale = gl.load(scales)
    scale_0, scale_1, scale_2, scale_3 = _scales(b_scales, rows, 0, ROWS)
    for k in range(steps):
        by_0 = _factors(row_scale, scale_0, scale_1, ROWS)
        by_1 = _factors(row_scale, scale_2, scale_3, ROWS)
        # for the next step; the last step reloads its own scales
        following = gl.minimum(k + 1, steps - 1)
        row_scale = gl.load(scales + following)
        scale_0, scale_1, scale_2, scale_3 = _scales(b_scales, rows, following, ROWS)
        a, b = wait_for_slot(ring, turn, WARPGROUP)
        product = warpgroup_mma(a, b.slice(0, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        acc_0 += warpgroup_mma_wait(0, deps=[product]) * by_0
        product = warpgroup_mma(a, b.slice(TILE, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        free_slot(ring, turn, True)
        acc_1 += product * by_1
        turn += 1
    return acc_0, acc_1, turn
