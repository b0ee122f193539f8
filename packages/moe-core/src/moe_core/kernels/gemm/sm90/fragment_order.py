"""4-bit words as the left operand of `moe_core.kernels.gemm.sm90.mixed_input`.

A warp group takes 64 rows at a time. It reads a step's words from shared memory and dequantizes them in registers,
where the tensor cores need them: `wgmma` and `mma.sync` have the left operand's columns in the same places. With
`wgmma` (`sums_by_wgmma`, the mainloop of one consumer), the next values are dequantized while the tensor cores multiply
64 rows and 64 columns of the weights. Values stay in registers until their MMAs are done.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from moe_core.kernels.device.registers import split_last
from moe_core.kernels.gemm.fragments.dequant import in_columns
from moe_core.kernels.gemm.fragments.operand import scales_in
from moe_core.kernels.gemm.sm90.pipeline import free_slot, full_slot, slot_and_phase

# Weight rows of one MMA.
ROWS = gl.constexpr(64)
# Number of such blocks per warp group of `moe_core.kernels.gemm.sm90.mixed_input`.
BLOCKS = gl.constexpr(2)
# Columns of a step, columns of one MMA, and words of a step per row.
STEP = gl.constexpr(128)
CHUNK = gl.constexpr(64)
WORDS = gl.constexpr(16)
_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
# Layout of words [ROWS, 16]: a thread has 16 bytes of row r and of row r + 8.
WORD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_LANES], _WARPS, [], [64, 16])
)
# The same for two rows stored in one, [ROWS / 2, 32].
PAIR_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [4, 0]], [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [32, 32]
    )
)
# Layout of one word u of each of four threads, [ROWS, 4].
QUARTER = gl.constexpr(gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, QUARTER.value))


@gluon.jit
def quarters(words):
    """words [64, 16] as four [64, 4]: word u of each of four threads."""
    parts = split_last(words.reshape([ROWS, 4, 4]))
    quarters = ()
    for u in gl.static_range(4):
        quarters += (gl.convert_layout(parts[u], QUARTER, assert_trivial=True),)
    return quarters


@gluon.jit
def numbers_of(words, scales, PLACE: gl.constexpr, layout: gl.constexpr, dequantize: gl.constexpr, dtype: gl.constexpr):
    """Values [64, 64] of columns 64 * PLACE .. of a step, as the tensor cores' left operand."""
    low = in_columns(dequantize(words[2 * PLACE], scales, 2 * PLACE, dtype), 1)
    high = in_columns(dequantize(words[2 * PLACE + 1], scales, 2 * PLACE + 1, dtype), 1)
    numbers = gl.join(low, high).permute([0, 2, 1]).reshape([64, 64])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.jit
def _scales_of_slot(ring, slot, k, first, form, dtype: gl.constexpr):
    """Scales [64] of the groups of step k, for rows from row `first` of the tile on.

    dtype: of the scales, see `scales_in`.
    """
    PER_STEP: gl.constexpr = ring[4].shape[0] // ring[2].shape[0]
    loaded = ()
    for i in gl.static_range(PER_STEP):
        loaded += (ring[4].index(slot * PER_STEP + i).slice(first, ROWS, 0).load(ROW_LAYOUT),)
    return scales_in(loaded, k, form.groups, dtype)


@gluon.jit
def load_words(ring, turn, k, given, form, dtype: gl.constexpr, WARPGROUP: gl.constexpr):
    """(words, scales) of iteration `turn` for each block of 64 rows of a consumer.

    The step is step k of its tile. dtype: of the stored scales. given: scales of the rows, which all steps share; if
    groups have scales, the factor of these, or None.
    """
    slot = full_slot(ring[2], turn)
    if form.gathers:
        fence_async_shared()
    SHARED: gl.constexpr = ring[1].shape[2] // WORDS
    words = ()
    scales = ()
    for block in gl.static_range(BLOCKS):
        rows = ring[1].index(slot).slice((WARPGROUP * BLOCKS + block) * ROWS // SHARED, ROWS // SHARED, 0)
        if SHARED == 2:
            loaded = gl.convert_layout(rows.load(PAIR_LAYOUT).reshape([ROWS, WORDS]), WORD_LAYOUT, assert_trivial=True)
        else:
            loaded = rows.load(WORD_LAYOUT)
        words += (quarters(loaded),)
        of_block = ()
        if form.groups > 0:
            found = _scales_of_slot(ring, slot, k, (WARPGROUP * BLOCKS + block) * ROWS, form, dtype)
            for i in gl.static_range(form.groups):
                scale = found[i]
                if given is not None:
                    scale *= given
                of_block += (scale,)
        scales += (of_block,)
    if form.groups == 0:
        return words, given
    else:
        return words, scales


@gluon.jit
def _zeros(HEIGHT: gl.constexpr):
    """Accumulators for 64 weight rows and HEIGHT activation rows.

    96 and 48 are not powers of two; they are split into two thirds and one third.
    """
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
    found = ()
    for i in gl.static_range(len(sums)):
        same = gl.convert_layout(numbers, gl.DotOperandLayout(0, sums[i].type.layout, 2), assert_trivial=True)
        rows = x.slice(i * sums[0].shape[1], sums[i].shape[1], 0)
        found += (warpgroup_mma(same, rows.permute((1, 0)), sums[i], is_async=True),)
    return found


@gluon.jit
def _wait(sums, numbers, OTHERS: gl.constexpr):
    """Wait for `sums`, while OTHERS other `_add`s may be in flight.

    `numbers` were in use until now.
    """
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
    """(sums [64, HEIGHT] of both blocks of 64 rows, number of steps so far).

    given, scale_dtype: see `load_words`.
    """
    x_tiles = ring[0]
    STAGES: gl.constexpr = ring[2].shape[0]
    dtype: gl.constexpr = x_tiles.dtype
    acc_0 = _zeros(HEIGHT)
    acc_1 = _zeros(HEIGHT)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_0[0].type.layout, 2)
    words, scales = load_words(ring, turn, 0, given, form, scale_dtype, WARPGROUP)
    numbers = numbers_of(words[0], scales[0], 0, operand, form.dequantize, dtype)
    for k in range(steps):
        slot, _ = slot_and_phase(turn, STAGES)
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
        # Dequantize the next step's first values alongside the last MMAs; after the last step, this step's
        # words again.
        following = turn + (k + 1 < steps).to(gl.int32)
        words, scales = load_words(ring, following, k + 1, given, form, scale_dtype, WARPGROUP)
        numbers = numbers_of(words[0], scales[0], 0, operand, form.dequantize, dtype)
        acc_1 = _wait(sum_1, last, 0)
        free_slot((x_tiles, ring[1], ring[2], ring[3], 0, 1), turn, True)
        turn += 1
    return (acc_0, acc_1), turn
