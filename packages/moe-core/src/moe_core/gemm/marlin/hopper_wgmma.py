"""The k loop of one consumer of `moe_core.gemm.marlin.hopper` by `wgmma`, whose left operand is in registers.

While the tensor cores multiply 64 rows and 64 columns of the weights, the next ones are made.  Numbers stay in
registers until their products are done.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moe_core.gemm.hopper_pipeline import free_slot
from moe_core.gemm.marlin.hopper_words import ROWS, load_words, numbers_of


@gluon.jit
def _zeros(HEIGHT: gl.constexpr):
    """Sums of 64 rows of weights and HEIGHT of activations; 96 and 48, no powers of two, are two thirds and one."""
    if HEIGHT % 3 == 0:
        return (_zeros(HEIGHT // 3 * 2)[0], _zeros(HEIGHT // 3)[0])
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEIGHT, 16]
        )
        return (gl.zeros([ROWS, HEIGHT], gl.float32, layout),)


@gluon.jit
def _add(numbers, x, sums):
    """sums + numbers @ x.T, in flight."""
    FIRST: gl.constexpr = sums[0].shape[1]
    sum_0 = warpgroup_mma(numbers, x.slice(0, FIRST, 0).permute((1, 0)), sums[0], is_async=True)
    if len(sums) == 2:
        layout: gl.constexpr = gl.DotOperandLayout(0, sums[1].type.layout, 2)
        same = gl.convert_layout(numbers, layout, assert_trivial=True)
        sum_1 = warpgroup_mma(same, x.slice(FIRST, FIRST // 2, 0).permute((1, 0)), sums[1], is_async=True)
        return (sum_0, sum_1)
    else:
        return (sum_0,)


@gluon.jit
def _wait(sums, numbers, OTHERS: gl.constexpr):
    """`sums` once they are there, while OTHERS other `_add`s may be in flight; `numbers` were theirs until now."""
    if len(sums) == 2:
        sums = warpgroup_mma_wait(2 * OTHERS, deps=[sums[0], sums[1]])
    else:
        sums = (warpgroup_mma_wait(OTHERS, deps=[sums[0]]),)
    gl.inline_asm_elementwise("", "=r,0", [numbers], dtype=numbers.dtype, is_pure=False, pack=2)
    return sums


@gluon.jit
def sums_by_wgmma(
    turn, ring, given, steps, form, scale_dtype: gl.constexpr, HEIGHT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """(sums [64, HEIGHT] of both blocks of 64 rows, number of steps so far); given, scale_dtype: see `load_words`."""
    x_tiles = ring[0]
    STAGES: gl.constexpr = ring[2].shape[0]
    dtype: gl.constexpr = x_tiles.dtype
    acc_0 = _zeros(HEIGHT)
    acc_1 = _zeros(HEIGHT)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_0[0].type.layout, 2)
    words, scales = load_words(ring, turn, 0, given, form, scale_dtype, WARPGROUP)
    numbers = numbers_of(words[0], scales[0], 0, operand, form.dequantize, dtype)
    for k in range(steps):
        slot = turn % STAGES
        x_0 = x_tiles.index(slot * 2)
        x_1 = x_tiles.index(slot * 2 + 1)
        sum_0 = _add(numbers, x_0, acc_0)
        last = numbers_of(words[1], scales[1], 0, operand, form.dequantize, dtype)
        sum_1 = _add(last, x_0, acc_1)
        acc_0 = _wait(sum_0, numbers, 1)
        numbers = numbers_of(words[0], scales[0], 1, operand, form.dequantize, dtype)
        sum_0 = _add(numbers, x_1, acc_0)
        acc_1 = _wait(sum_1, last, 1)
        last = numbers_of(words[1], scales[1], 1, operand, form.dequantize, dtype)
        sum_1 = _add(last, x_1, acc_1)
        acc_0 = _wait(sum_0, numbers, 1)
        # the next step's first numbers, beside the last products; behind the last step this one's words again
        following = turn + (k + 1 < steps).to(gl.int32)
        words, scales = load_words(ring, following, k + 1, given, form, scale_dtype, WARPGROUP)
        numbers = numbers_of(words[0], scales[0], 0, operand, form.dequantize, dtype)
        acc_1 = _wait(sum_1, last, 0)
        free_slot((x_tiles, ring[1], ring[2], ring[3], 0, 1), turn, True)
        turn += 1
    return (acc_0, acc_1), turn
