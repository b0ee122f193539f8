"""Words of 4-bit codes x 16-bit activations on Hopper with many rows per expert: dequantising beside the tensor cores.

The tile kernel of `moe_core.gemm` dequantises a step's words and then multiplies them.  Here, as in
`moe_core.gemm.hopper`, one warp does nothing but request words and activations; rows of tokens, which no tensor map
gathers, take four warps of 16-byte copies.  Two groups of four warps each own 128 rows of a
tile of 256 rows of weights.  Each makes the numbers of 64 rows and 64 columns while the tensor cores still multiply
those before them.  Programs are persistent: one per multiprocessor.

Products are transposed, weights first, from registers.  `wgmma` takes them 64 rows at a time, however few rows of
activations there are; with `mma.sync` the way of a product is short, nothing waits for one, and the compiler mixes
dequantising and products by itself.  Activations are four times as many bytes as weights: a tile has
more rows of weights than of activations, because otherwise the way from L2 would be the limit.  A tile of the schedule
takes the smallest of HEIGHTS that its rows fit in, so that an expert's last rows cost what they are.

By `wgmma` sums are added up in the order of the tile kernel: results are the same, bit for bit, but for the activation
function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_core.gemm.hopper_epilogue import activate
from moe_core.gemm.hopper_pipeline import allocate_barriers, empty_slot, free_slot, full_slot, locate_tile, tma_load
from moe_core.gemm.marlin.dequant import in_columns, split_last
from moe_core.gemm.marlin.operand import scale_of
from moe_core.gemm.tile_kernel import deinterleave, finish_values
from moe_core.jit.pdl import begin_pdl

# the name of Triton 3.6, where a newer one is missing
copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

# rows of weights of a tile, of one group of four warps, and of one product
TILE = gl.constexpr(256)
PART = gl.constexpr(128)
ROWS = gl.constexpr(64)
# columns of a step, of one product, and of one word of each of four threads
STEP = gl.constexpr(128)
CHUNK = gl.constexpr(64)
WORDS = gl.constexpr(16)
_LANES = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
# words [ROWS, 16]: a thread has 16 bytes of row r and of row r + 8
WORD_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_LANES], _WARPS, [], [64, 16])
)
# one word u of each of four threads, [ROWS, 4]
QUARTER = gl.constexpr(gl.DistributedLinearLayout([[8, 0]], [[0, 1], [0, 2], *_LANES], _WARPS, [], [64, 4]))
ROW_LAYOUT = gl.constexpr(gl.SliceLayout(1, QUARTER.value))
# sums of `mma.sync`, whose left operand has the columns of a thread where that of `wgmma` has them
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))


class WordsForm(NamedTuple):
    """What the kernel is compiled for; constants, and a device function.

    - ``heights`` descending, the first is that of the schedule's tiles: powers of two, and three quarters of them; the
      activations' descriptor has blocks of a common divisor
    - ``groups`` and ``dequantize``: `moe_core.gemm.marlin.weight.WordFunctions`
    - ``mma_sync``: `mma.sync` multiplies instead of `wgmma`
    - ``interleaved``: gate and up rows alternate in blocks of 8; ``gathers``: activations are rows of tokens
    """

    heights: gl.constexpr
    groups: gl.constexpr
    mma_sync: gl.constexpr
    interleaved: gl.constexpr
    gathers: gl.constexpr
    group_m: gl.constexpr
    dequantize: Any


@gluon.jit
def _height(rows, HEIGHTS: gl.constexpr):
    """The smallest of the descending HEIGHTS that is not below `rows`."""
    height = rows * 0 + HEIGHTS[0]
    for i in gl.static_range(1, len(HEIGHTS)):
        height = gl.where(rows <= HEIGHTS[i], HEIGHTS[i], height)
    return height


@gluon.jit
def _quarters(words):
    """words [64, 16] as four [64, 4]: word u of four threads each."""
    parts = split_last(words.reshape([ROWS, 4, 4]))
    quarters = ()
    for u in gl.static_range(4):
        quarters += (gl.convert_layout(parts[u], QUARTER, assert_trivial=True),)  # type: ignore[assignment]
    return quarters


@gluon.jit
def _chunk(words, scales, PLACE: gl.constexpr, layout: gl.constexpr, dequantize: gl.constexpr, dtype: gl.constexpr):
    """Numbers [64, 64] of columns 64 * PLACE .. of a step, as the tensor cores' left operand."""
    low = in_columns(dequantize(words[2 * PLACE], scales, 2 * PLACE, dtype), 1)
    high = in_columns(dequantize(words[2 * PLACE + 1], scales, 2 * PLACE + 1, dtype), 1)
    numbers = gl.join(low, high).permute([0, 2, 1]).reshape([64, 64])
    return gl.convert_layout(numbers, layout, assert_trivial=True)


@gluon.jit
def _scales(pointer, k, stride, groups, GROUPS: gl.constexpr):
    """Scales [64] of the GROUPS groups of step k; 0: of the row."""
    if GROUPS == 0:
        return (gl.load(pointer),)
    else:
        found = ()
        for i in gl.static_range(GROUPS):
            found += (gl.load(pointer + gl.minimum(k * GROUPS + i, groups - 1) * stride),)  # type: ignore[assignment]
        return found


@gluon.jit
def _words(ring, turn, form, WARPGROUP: gl.constexpr):
    """Words of step `turn`, of both blocks of 64 rows."""
    words = ring[1].index(full_slot(ring[2], turn))
    if form.gathers:
        # threads wrote the activations, the tensor cores read them
        fence_async_shared()
    return (
        _quarters(words.slice(WARPGROUP * PART, ROWS, 0).load(WORD_LAYOUT)),
        _quarters(words.slice(WARPGROUP * PART + ROWS, ROWS, 0).load(WORD_LAYOUT)),
    )


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
def _sums(turn, ring, scale_0, scale_1, stride, groups, steps, form, HEIGHT: gl.constexpr, WARPGROUP: gl.constexpr):
    """(sums [64, HEIGHT] of both blocks of 64 rows, number of steps that were taken so far)."""
    x_tiles = ring[0]
    STAGES: gl.constexpr = ring[2].shape[0]
    GROUPS: gl.constexpr = form.groups
    dtype: gl.constexpr = x_tiles.dtype
    acc_0 = _zeros(HEIGHT)
    acc_1 = _zeros(HEIGHT)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_0[0].type.layout, 2)
    scales_0 = _scales(scale_0, 0, stride, groups, GROUPS)
    scales_1 = _scales(scale_1, 0, stride, groups, GROUPS)
    words_0, words_1 = _words(ring, turn, form, WARPGROUP)
    numbers = _chunk(words_0, scales_0, 0, operand, form.dequantize, dtype)
    for k in range(steps):
        slot = turn % STAGES
        next_0 = scales_0
        next_1 = scales_1
        if GROUPS != 0:
            next_0 = _scales(scale_0, k + 1, stride, groups, GROUPS)
            next_1 = _scales(scale_1, k + 1, stride, groups, GROUPS)
        x_0 = x_tiles.index(slot * 2)
        x_1 = x_tiles.index(slot * 2 + 1)
        sum_0 = _add(numbers, x_0, acc_0)
        last = _chunk(words_1, scales_1, 0, operand, form.dequantize, dtype)
        sum_1 = _add(last, x_0, acc_1)
        acc_0 = _wait(sum_0, numbers, 1)
        numbers = _chunk(words_0, scales_0, 1, operand, form.dequantize, dtype)
        sum_0 = _add(numbers, x_1, acc_0)
        acc_1 = _wait(sum_1, last, 1)
        last = _chunk(words_1, scales_1, 1, operand, form.dequantize, dtype)
        sum_1 = _add(last, x_1, acc_1)
        acc_0 = _wait(sum_0, numbers, 1)
        # the next step's first numbers, beside the last products; behind the last step this one's words again
        words_0, words_1 = _words(ring, turn + (k + 1 < steps).to(gl.int32), form, WARPGROUP)
        scales_0 = next_0
        scales_1 = next_1
        numbers = _chunk(words_0, scales_0, 0, operand, form.dequantize, dtype)
        acc_1 = _wait(sum_1, last, 0)
        free_slot((x_tiles, ring[1], ring[2], ring[3], 0, 1), turn, True)
        turn += 1
    return acc_0, acc_1, turn


@gluon.jit
def _zeros_of_mma(HEIGHT: gl.constexpr):
    """As `_zeros`."""
    if HEIGHT % 3 == 0:
        return (_zeros_of_mma(HEIGHT // 3 * 2)[0], _zeros_of_mma(HEIGHT // 3)[0])
    else:
        return (gl.zeros([ROWS, HEIGHT], gl.float32, MMA),)


@gluon.jit
def _multiply(numbers_0, numbers_1, x, acc_0, acc_1):
    """Sums of both blocks + numbers @ x.T; a warp reads the rows of `x` once for both."""
    right: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    sums_0 = ()
    sums_1 = ()
    for i in gl.static_range(len(acc_0)):
        rows = x.slice(i * acc_0[0].shape[1], acc_0[i].shape[1], 0).permute((1, 0)).load(right)
        sums_0 += (mma_v2(numbers_0, rows, acc_0[i]),)  # type: ignore[assignment]
        sums_1 += (mma_v2(numbers_1, rows, acc_1[i]),)  # type: ignore[assignment]
    return sums_0, sums_1


@gluon.jit
def _sums_by_mma(
    turn, ring, scale_0, scale_1, stride, groups, steps, form, HEIGHT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """As `_sums`, by `mma.sync`: nothing is in flight, and the compiler mixes dequantising and products."""
    x_tiles = ring[0]
    STAGES: gl.constexpr = ring[2].shape[0]
    GROUPS: gl.constexpr = form.groups
    dtype: gl.constexpr = x_tiles.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc_0 = _zeros_of_mma(HEIGHT)
    acc_1 = _zeros_of_mma(HEIGHT)
    scales_0 = _scales(scale_0, 0, stride, groups, GROUPS)
    scales_1 = _scales(scale_1, 0, stride, groups, GROUPS)
    words_0, words_1 = _words(ring, turn, form, WARPGROUP)
    for k in range(steps):
        slot = turn % STAGES
        next_scales_0 = scales_0
        next_scales_1 = scales_1
        if GROUPS != 0:
            next_scales_0 = _scales(scale_0, k + 1, stride, groups, GROUPS)
            next_scales_1 = _scales(scale_1, k + 1, stride, groups, GROUPS)
        numbers_0 = _chunk(words_0, scales_0, 0, operand, form.dequantize, dtype)
        numbers_1 = _chunk(words_1, scales_1, 0, operand, form.dequantize, dtype)
        acc_0, acc_1 = _multiply(numbers_0, numbers_1, x_tiles.index(slot * 2), acc_0, acc_1)
        numbers_0 = _chunk(words_0, scales_0, 1, operand, form.dequantize, dtype)
        numbers_1 = _chunk(words_1, scales_1, 1, operand, form.dequantize, dtype)
        # the next step's words are on their way to registers meanwhile; behind the last step this one's again
        words_0, words_1 = _words(ring, turn + (k + 1 < steps).to(gl.int32), form, WARPGROUP)
        acc_0, acc_1 = _multiply(numbers_0, numbers_1, x_tiles.index(slot * 2 + 1), acc_0, acc_1)
        scales_0 = next_scales_0
        scales_1 = next_scales_1
        free_slot((x_tiles, ring[1], ring[2], ring[3], 0, 1), turn, True)
        turn += 1
    return acc_0, acc_1, turn


@gluon.jit
def _finish(acc, factor, epilogue, result, pairs, expert, start, end, first, N, INTERLEAVED: gl.constexpr):
    """From a finished product [64, rows] of rows `first` .. of the weights and `start` .. to the stores."""
    HEIGHT: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = result.out.dtype.element_ty
    GEMM1: gl.constexpr = epilogue.activation != ""
    WIDTH: gl.constexpr = 32 if INTERLEAVED else 64
    if factor is not None:
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    value = acc
    up = acc
    if INTERLEAVED:
        value, up = deinterleave(acc, True)
    column = first // 2 if INTERLEAVED else first
    layout: gl.constexpr = value.type.layout
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    rows = gl.minimum(start + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, layout)), end - 1)
    pair = rows
    if epilogue.weights is not None and pairs is not None:
        pair = gl.load(pairs + rows)
    value = finish_values(value, up, epilogue, N, expert, pair, columns, None, activate, True, False)
    # eight consecutive columns of a row of the result per thread
    store: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(dtype), store)
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, store))
    place = start + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, store))
    exists = place < end
    if not GEMM1 and pairs is not None:
        place = gl.load(pairs + gl.minimum(place, end - 1))
    limit = result.width if GEMM1 else N
    pointers = result.out + place.to(gl.int64)[None, :] * result.stride + columns[:, None]
    gl.store(pointers, value, mask=exists[None, :] & (columns < limit)[:, None])


@gluon.jit
def _tile(
    turn, tile, ring, schedule, b_args, result, epilogue, sizes, form, HEIGHT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """Multiply, finish and store one tile; the number of steps that were taken so far."""
    words, scales, channel_scales, stride_e, stride_n, scale_e, scale_g, channel_e, groups, _ = b_args
    expert, start, end, block_n = tile
    tiles, blocks_n, steps, N, rows_per_expert = sizes
    first = block_n * TILE + WARPGROUP * PART
    row = gl.arange(0, 64, layout=ROW_LAYOUT)
    row_0 = gl.minimum(first + row, rows_per_expert - 1)
    row_1 = gl.minimum(first + ROWS + row, rows_per_expert - 1)
    scale = scales + expert.to(gl.int64) * scale_e
    sums: gl.constexpr = _sums_by_mma if form.mma_sync else _sums
    acc_0, acc_1, turn = sums(turn, ring, scale + row_0, scale + row_1, scale_g, groups, steps, form, HEIGHT, WARPGROUP)
    factor_0 = None
    factor_1 = None
    if form.groups == 0:
        factor_0 = scale_of(gl.load(scale + row_0))
        factor_1 = scale_of(gl.load(scale + row_1))
    elif channel_scales is not None:
        channel = channel_scales + expert.to(gl.int64) * channel_e
        factor_0 = gl.load(channel + row_0)
        factor_1 = gl.load(channel + row_1)
    for i in gl.static_range(len(acc_0)):
        at = start + i * (HEIGHT // 3 * 2)
        _finish(acc_0[i], factor_0, epilogue, result, schedule[2], expert, at, end, first, N, form.interleaved)
        _finish(acc_1[i], factor_1, epilogue, result, schedule[2], expert, at, end, first + ROWS, N, form.interleaved)
    return turn


@gluon.jit
def _consumer(schedule, b_args, result, epilogue, ring, sizes, form, WARPGROUP: gl.constexpr):
    """Multiply rows 128 * WARPGROUP .. 128 * WARPGROUP + 127 of every tile of weights."""
    tiles, blocks_n, steps, N, rows_per_expert = sizes
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        tile = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
        height = _height(tile[2] - tile[1], form.heights)
        for i in gl.static_range(len(form.heights)):
            if height == form.heights[i]:
                turn = _tile(
                    turn, tile, ring, schedule, b_args, result, epilogue, sizes, form, form.heights[i], WARPGROUP
                )


@gluon.jit
def _producer(x, w_desc, schedule, ring, sizes, K, form):
    """Request every tile that this program multiplies, as far ahead as there is room.

    Activations in sorted order by their descriptor; of tokens by four warps, which copy their rows, 16 bytes a thread.
    """
    x_tiles, w_tiles, full, empty = ring
    tiles, blocks_n, steps, N, rows_per_expert = sizes
    HEIGHTS: gl.constexpr = form.heights
    BYTES: gl.constexpr = TILE * WORDS * 4
    if form.gathers:
        values, stride, per_row = x
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        place = gl.arange(0, HEIGHTS[0], layout=gl.SliceLayout(1, layout))
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        expert, start, end, block_n = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
        row = expert * rows_per_expert + block_n * TILE
        if form.gathers:
            token = gl.load(schedule[2] + gl.minimum(start + place, end - 1)) // per_row
            source = values + token.to(gl.int64) * stride
        height = _height(end - start, HEIGHTS)
        for k in range(steps):
            slot = empty_slot(empty, turn)
            ready = full.index(slot)
            if form.gathers:
                mbarrier.expect(ready, BYTES)
            else:
                for i in gl.static_range(len(HEIGHTS)):
                    mbarrier.expect(ready, BYTES + HEIGHTS[i] * STEP * 2, pred=height == HEIGHTS[i])
            tma_load(w_desc, [row, k * WORDS], ready, w_tiles.index(slot))
            if form.gathers:
                for half in gl.static_range(2):
                    at = k * STEP + half * CHUNK + column
                    mask = (place < height)[:, None] & (at < K)[None, :]
                    copy_rows(x_tiles.index(slot * 2 + half), source[:, None] + at[None, :], mask=mask)
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                BOX: gl.constexpr = x.block_shape[0]
                for box in gl.static_range(HEIGHTS[0] // BOX):
                    for half in gl.static_range(2):
                        target = x_tiles.index(slot * 2 + half).slice(box * BOX, BOX, 0)
                        at = [start + box * BOX, k * STEP + half * CHUNK]
                        tma_load(x, at, ready, target, pred=height > box * BOX)
            turn += 1


@gluon.jit
def words_kernel(
    x_desc,
    x_rows,
    w_desc,
    schedule,
    b_args,
    result,
    epilogue,
    N,
    K,
    rows_per_expert,
    form,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """One program per multiprocessor.

    GEMM1: out [P, width] = act(x w13^T + bias), rows in sorted order; gemm2: out[pair] = x w2^T + bias.

    - x_desc [P, K] in sorted order and w_desc [E * rows_per_expert, words]: descriptors
    - or x_rows = (x [tokens, K], row stride, pairs of a token), x_desc None
    - b_args as the tile kernel's device functions have it, schedule, result and epilogue as there
    - N columns of the result, of one half where gated; form: `WordsForm`
    """
    begin_pdl(PDL)
    dtype: gl.constexpr = x_rows[0].dtype.element_ty if form.gathers else x_desc.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, form.heights[0], CHUNK], x_layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE, WORDS], w_desc.layout)
    full, empty = allocate_barriers(STAGES, 129 if form.gathers else 1)
    fence_async_shared()
    ring = (x_tiles, w_tiles, full, empty)
    tiles = gl.load(schedule[0])
    steps = gl.cdiv(K, STEP)
    blocks_n = gl.cdiv(rows_per_expert, TILE)
    sizes = (tiles, blocks_n, steps, N, rows_per_expert)
    if form.gathers:
        x = x_rows
    else:
        x = x_desc
    gl.warp_specialize(
        [
            (_consumer, (schedule, b_args, result, epilogue, ring, sizes, form, gl.constexpr(0))),
            (_consumer, (schedule, b_args, result, epilogue, ring, sizes, form, gl.constexpr(1))),
            (_producer, (x, w_desc, schedule, ring, sizes, K, form)),
        ],
        [4, 4 if form.gathers else 1],
        [224 if form.gathers else 240, 56 if form.gathers else 24],
    )
