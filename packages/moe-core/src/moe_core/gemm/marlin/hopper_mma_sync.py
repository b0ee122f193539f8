"""The k loop of one consumer of `moe_core.gemm.marlin.hopper` by `mma.sync`, for few rows of activations.

`wgmma` takes weights from registers 64 rows at a time, at the same pace however few rows of activations there are.
Here the way of a product is short, nothing is in flight that anything waits for, and the compiler mixes dequantising
and products by itself.  A warp reads activations from shared memory once for all of its rows of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_core.gemm.hopper_pipeline import free_slot
from moe_core.gemm.marlin.hopper_words import MMA_SYNC, load_words, next_scales, numbers_of, zeros


@gluon.jit
def multiply_half(words, scales, x, sums, PLACE: gl.constexpr, dequantize: gl.constexpr):
    """`sums` of each block + its numbers of columns 64 * PLACE .. @ x.T."""
    left: gl.constexpr = gl.DotOperandLayout(0, MMA_SYNC, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, MMA_SYNC, 2)
    rows = ()
    for i in gl.static_range(len(sums[0])):
        part = x.slice(i * sums[0][0].shape[1], sums[0][i].shape[1], 0)
        rows += (part.permute((1, 0)).load(right),)  # type: ignore[assignment]
    found = ()
    for block in gl.static_range(len(sums)):
        numbers = numbers_of(words[block], scales[block], PLACE, left, dequantize, x.dtype)
        of_block = ()
        for i in gl.static_range(len(sums[0])):
            of_block += (mma_v2(numbers, rows[i], sums[block][i]),)  # type: ignore[assignment]
        found += (of_block,)  # type: ignore[assignment]
    return found


@gluon.jit
def sums_by_mma_sync(
    turn, ring, scales, pointers, stride, groups, steps, form, HEIGHT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """(sums [64, HEIGHT] of each block of 64 rows, number of steps that were taken so far), as `sums_by_wgmma`."""
    x_tiles = ring[0]
    STAGES: gl.constexpr = ring[2].shape[0]
    sums = ()
    for _ in gl.static_range(form.blocks):
        sums += (zeros(HEIGHT, True),)  # type: ignore[assignment]
    words = load_words(ring, turn, form, WARPGROUP)
    for k in range(steps):
        slot = turn % STAGES
        following = next_scales(scales, pointers, k + 1, stride, groups, form.groups)
        sums = multiply_half(words, scales, x_tiles.index(slot * 2), sums, 0, form.dequantize)
        sums = multiply_half(words, scales, x_tiles.index(slot * 2 + 1), sums, 1, form.dequantize)
        # behind the last step this one's words again
        words = load_words(ring, turn + (k + 1 < steps).to(gl.int32), form, WARPGROUP)
        scales = following
        free_slot((x_tiles, ring[1], ring[2], ring[3], 0, 1), turn, True)
        turn += 1
    return sums, turn
