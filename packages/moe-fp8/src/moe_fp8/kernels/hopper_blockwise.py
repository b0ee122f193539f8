"""The k loop of one consumer in `moe_core.gemm.hopper`, with scales by block: 64 rows times two blocks of 128 columns.

One float32 scale per row and step, and per weight block, whose depth is that of a step: each step's product is added,
scaled.  a_args = (scales [P, steps], row stride), b_args = (scales [E, rows / block rows, steps], expert stride, row
stride, rows of a block as a constant).
"""

from __future__ import annotations

from moe_core.hopper_api import HALF, LAYOUT, TILE, free_slot, wait_for_slot
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_fp8.kernels.block import FLOAT32_MAX, NAN


@gluon.jit
def _scale_rows(block_n, stride, N, ROWS: gl.constexpr, GATED: gl.constexpr):
    """Offsets of the scales of rows 0, 64, 128 and 192 of a tile's weights; rows beyond the last column have any."""
    PER_TILE: gl.constexpr = TILE // ROWS
    last = gl.cdiv(N, ROWS) - 1
    # the neighbour of a short tile's last block may lie beyond the columns altogether
    if GATED:
        first = gl.minimum(block_n * PER_TILE, last)
        second = gl.minimum(first + PER_TILE - 1, last)
        up = last + 1
        return first * stride, second * stride, (first + up) * stride, (second + up) * stride
    else:
        first = gl.minimum(block_n * (2 * PER_TILE), last)
        return (
            first * stride,
            gl.minimum(first + PER_TILE - 1, last) * stride,
            gl.minimum(first + PER_TILE, last) * stride,
            gl.minimum(first + 2 * PER_TILE - 1, last) * stride,
        )


@gluon.jit
def _scales(pointer, rows, k, ROWS: gl.constexpr):
    """Scales of step `k` of the four quarters of the weights' rows, which are two halves for blocks of 128 rows."""
    scale_0 = gl.load(pointer + rows[0] + k)
    scale_2 = gl.load(pointer + rows[2] + k)
    if ROWS == TILE:
        return scale_0, scale_0, scale_2, scale_2
    else:
        return scale_0, gl.load(pointer + rows[1] + k), scale_2, gl.load(pointer + rows[3] + k)


@gluon.jit
def _factor(row_scale, scale):
    # never infinity: weights of zero may have any scale, and 0 * infinity is no number
    return gl.minimum(row_scale * scale, FLOAT32_MAX, propagate_nan=NAN)


@gluon.jit
def _add(low, high, product, by_low, by_high, ROWS: gl.constexpr):
    """Add a scaled product [64, 128]: to `low` [64, 128] for blocks of 128 rows, else to its halves of 64 columns."""
    if ROWS == TILE:
        return low + product * by_low[:, None], high
    else:
        product_low, product_high = _halves(product)
        layout: gl.constexpr = gl.SliceLayout(1, low.type.layout)
        by_low = gl.convert_layout(by_low, layout, assert_trivial=True)
        by_high = gl.convert_layout(by_high, layout, assert_trivial=True)
        return low + product_low * by_low[:, None], high + product_high * by_high[:, None]


@gluon.jit
def _halves(tile):
    """Columns 0 to 63 and 64 to 127 of [64, 128]; no value changes its register."""
    return tile.reshape([HALF, 2, TILE // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _whole(low, high):
    """The opposite of `_halves`."""
    tile = gl.join(low, high).permute([0, 2, 1]).reshape([HALF, TILE])
    return gl.convert_layout(tile, LAYOUT, assert_trivial=True)


@gluon.jit
def scaled_mm_blockwise(
    turn, row, expert, block_n, a_args, b_args, ring, steps, N, WARPGROUP: gl.constexpr, GATED: gl.constexpr
):
    """(scaled float32 products [64, 128] of both blocks, number of steps that were taken so far)."""
    ROWS: gl.constexpr = b_args[3]
    scales = a_args[0] + row.to(gl.int64) * a_args[1]
    b_scales = b_args[0] + expert.to(gl.int64) * b_args[1]
    rows = _scale_rows(block_n, b_args[2], N, ROWS, GATED)
    zero = gl.zeros([HALF, TILE], gl.float32, LAYOUT)
    if ROWS == TILE:
        acc_0, acc_1, acc_2, acc_3 = zero, zero, zero, zero
    else:
        acc_0, acc_1 = _halves(zero)
        acc_2, acc_3 = _halves(zero)
    row_scale = gl.load(scales)
    scale_0, scale_1, scale_2, scale_3 = _scales(b_scales, rows, 0, ROWS)
    for k in range(steps):
        by_0 = _factor(row_scale, scale_0)
        by_1 = _factor(row_scale, scale_1)
        by_2 = _factor(row_scale, scale_2)
        by_3 = _factor(row_scale, scale_3)
        # for the next step; the last one reads its own again
        following = gl.minimum(k + 1, steps - 1)
        row_scale = gl.load(scales + following)
        scale_0, scale_1, scale_2, scale_3 = _scales(b_scales, rows, following, ROWS)
        a, b = wait_for_slot(ring, turn, WARPGROUP)
        product = warpgroup_mma(a, b.slice(0, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        acc_0, acc_1 = _add(acc_0, acc_1, product, by_0, by_1, ROWS)
        product = warpgroup_mma(a, b.slice(TILE, TILE, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        free_slot(ring, turn, True)
        acc_2, acc_3 = _add(acc_2, acc_3, product, by_2, by_3, ROWS)
        turn += 1
    if ROWS == TILE:
        return acc_0, acc_2, turn
    else:
        return _whole(acc_0, acc_1), _whole(acc_2, acc_3), turn
