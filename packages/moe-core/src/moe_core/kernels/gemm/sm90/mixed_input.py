"""4-bit words x 16-bit activations on Hopper with many rows per expert.

The tile kernel of `moe_core.kernels.gemm` dequantizes a step's words and then multiplies them. Here, dequantization
overlaps with the tensor cores. As in `moe_core.kernels.gemm.sm90.kernel`, one producer warp only requests words and
activations. Rows by token, which no TMA descriptor gathers, take four warps of 16-byte copies instead. Two consumer
warp groups share a tile of weights, each in blocks of 64 rows. The kernel is persistent: one CTA per SM.

Products are transposed, with weights first, from registers. Activations are four times as many bytes as weights. So a
tile has more weight rows than activation rows; otherwise L2 bandwidth would be the limit. A tile of the schedule uses
the smallest of HEIGHTS that holds its rows, so that the cost of an expert's last rows matches their number.

Exposed latency would take a third of the time of a tile with few steps. So a tile's index in the schedule is requested
before the mainloop of the previous tile, its pairs before that tile's epilogue, and its router weights before its own
mainloop. Group scales are loaded with their packed weights, the same number of steps ahead.

Sums are accumulated in the order of the tile kernel. Results are bitwise equal, except for the activation function, and
for int4 with scales near the limits of float32 (`moe_core.kernels.gemm.fragments.scales.powers_of`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from moe_core.kernels.device.gluon import barrier, copy_rows, tma_load
from moe_core.kernels.device.pdl import begin_pdl
from moe_core.kernels.device.registers import word_pointers
from moe_core.kernels.gemm.fragments.operand import scale_of
from moe_core.kernels.gemm.sm90.epilogue import activate
from moe_core.kernels.gemm.sm90.fragment_order import BLOCKS, CHUNK, ROW_LAYOUT, ROWS, STEP, WORDS, sums_by_wgmma
from moe_core.kernels.gemm.sm90.pipeline import allocate_barriers, empty_slot, locate_tile, tile_start
from moe_core.kernels.gemm.tiles.tile_kernel import deinterleave, finish_values

# Warp groups that multiply.
CONSUMERS = gl.constexpr(2)
# Weight rows of a tile.
TILE = gl.constexpr(CONSUMERS.value * BLOCKS.value * ROWS.value)


class WordsForm(NamedTuple):
    """Compile-time parameters of the kernel: constants, and a device function.

    Attributes:
        heights: Tile heights, descending, starting with that of the schedule's tiles: powers of two, and three quarters
            of them. The activations' descriptor has blocks of a common divisor.
        groups: Groups of a step, see `moe_core.kernels.gemm.marlin.weight.WordFunctions`.
        interleaved: Whether gate and up rows alternate in blocks of 8.
        gathers: Whether activations are rows by token.
        group_m: Row tiles that are rasterized together.
        dequantize: Device function, see `moe_core.kernels.gemm.marlin.weight.WordFunctions`.
    """

    heights: gl.constexpr
    groups: gl.constexpr
    interleaved: gl.constexpr
    gathers: gl.constexpr
    group_m: gl.constexpr
    dequantize: Any


@gluon.jit
def _height(rows, HEIGHTS: gl.constexpr):
    """The smallest of the descending HEIGHTS that is at least `rows`."""
    height = rows * 0 + HEIGHTS[0]
    for i in gl.static_range(1, len(HEIGHTS)):
        height = gl.where(rows <= HEIGHTS[i], HEIGHTS[i], height)
    return height


@gluon.jit
def _prefetch(tile, in_use, schedule, b_args, epilogue, sizes, form, WARPGROUP: gl.constexpr):
    """Loads for the tile of a `tile_start`, in flight.

    (end of the expert's rows, scales of the rows of each block, their channel scales, pairs of the rows, the expert's
    power); all but the first are () where there are none. The number of rows of the tile is not known yet. So pairs are
    loaded for the tallest tile, including rows of other experts, and row 0 replaces rows that are not `in_use`.
    """
    expert, first, block_n = tile
    end = gl.load(schedule[1] + expert + 1)
    scales = ()
    factors = ()
    for block in gl.static_range(BLOCKS):
        row = block_n * TILE + (WARPGROUP * BLOCKS + block) * ROWS + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        row = gl.minimum(row, sizes[4] - 1)
        if form.groups == 0:
            scale = gl.load(b_args.scales + expert.to(gl.int64) * b_args.scale_e + row)
            scales += ((scale,),)
        if b_args.others is not None:
            factor = gl.load(b_args.others + expert.to(gl.int64) * b_args.other_e + row)
            factors += (factor,)
    pairs = ()
    if epilogue.weights is not None or epilogue.activation == "":
        row = first + gl.arange(0, form.heights[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
        row = gl.where(row < in_use, row, 0)
        if schedule[2] is not None:
            row = gl.load(schedule[2] + row)
        pairs += (row,)
    power = ()
    if b_args.powers is not None:
        power += (gl.load(b_args.powers + expert),)
    return end, scales, factors, pairs, power


@gluon.jit
def _finish(acc, factor, epilogue, result, of_rows, tile, end, first, N, form, PART: gl.constexpr):
    """Run the epilogue of a finished accumulator [64, rows], up to the stores.

    It covers weight rows from `first` on, and tile rows from PART on. of_rows: router weights and pairs of the tile's
    rows, in shared memory; end: end of the expert's rows.
    """
    HEIGHT: gl.constexpr = acc.shape[1]
    dtype: gl.constexpr = result.out.dtype.element_ty
    GEMM1: gl.constexpr = epilogue.activation != ""
    WIDTH: gl.constexpr = 32 if form.interleaved else 64
    expert, start, _ = tile
    if factor is not None:
        acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    value = acc
    up = acc
    if form.interleaved:
        value, up = deinterleave(acc, True)
    column = first // 2 if form.interleaved else first
    layout: gl.constexpr = value.type.layout
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    weight = None
    if epilogue.weights is not None:
        weight = of_rows[0].slice(PART, HEIGHT, 0).load(gl.SliceLayout(0, layout))[None, :]
    value = finish_values(value, up, epilogue, N, expert, None, columns, None, activate, True, False, weight)
    # Eight consecutive columns of a row of the result per thread.
    store: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(dtype), store)
    columns = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, store))
    place = start + PART + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, store))
    exists = place < end
    if not GEMM1:
        place = of_rows[1].slice(PART, HEIGHT, 0).load(gl.SliceLayout(0, store))
    limit = result.width if GEMM1 else N
    pointers = result.out + place.to(gl.int64)[None, :] * result.stride + columns[:, None]
    gl.store(pointers, value, mask=exists[None, :] & (columns < limit)[:, None])


@gluon.jit
def _tile(
    turn,
    tile,
    ahead,
    following,
    in_use,
    schedule,
    b_args,
    result,
    epilogue,
    ring,
    of_rows,
    sizes,
    form,
    HEIGHT: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Multiply, finish and store one tile, whose `_prefetch` is `ahead`.

    Returns (number of steps so far, `_prefetch` of the tile `following`).
    """
    end, scales, factors, pairs, power = ahead
    weight = None
    if epilogue.weights is not None:
        weight = gl.load(epilogue.weights + pairs[0])
    given = None
    if form.groups == 0:
        given = scales
    elif len(power) > 0:
        # 2^126 / power
        given = (-1107296256 - power[0].to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    scale_dtype: gl.constexpr = b_args.scales.dtype.element_ty
    sums, turn = sums_by_wgmma(turn, ring, given, sizes[2], form, scale_dtype, HEIGHT, WARPGROUP)
    ahead = _prefetch(following, in_use, schedule, b_args, epilogue, sizes, form, WARPGROUP)
    if len(pairs) > 0:
        # All warps have read those of the previous tile: they synchronized in the mainloop.
        of_rows[1].store(pairs[0])
        if weight is not None:
            of_rows[0].store(weight)
        barrier()
    first = tile[2] * TILE + WARPGROUP * (BLOCKS * ROWS)
    for i in gl.static_range(len(sums[0])):
        for block in gl.static_range(BLOCKS):
            factor = None
            if form.groups == 0:
                factor = scale_of(scales[block][0])
            elif len(factors) > 0:
                factor = factors[block]
            elif len(power) > 0:
                factor = gl.full([ROWS], 128.0, gl.float32, ROW_LAYOUT) * power[0]
            _finish(
                sums[block][i],
                factor,
                epilogue,
                result,
                of_rows,
                tile,
                end,
                first + block * ROWS,
                sizes[3],
                form,
                i * (HEIGHT // 3 * 2),
            )
    return turn, ahead


@gluon.jit
def _consumer(schedule, b_args, result, epilogue, ring, of_rows, sizes, form, WARPGROUP: gl.constexpr):
    """Multiply the blocks of one warp group of every tile of weights."""
    tiles, blocks_n, steps, N, rows_per_expert = sizes
    own = (of_rows[0].index(WARPGROUP), of_rows[1].index(WARPGROUP))
    tile = tile_start(gl.program_id(0), schedule, tiles, blocks_n, form.group_m)
    # Rows are in use up to the end of the last tile.
    in_use = locate_tile(tiles * blocks_n, schedule, tiles, blocks_n, form.group_m)[2]
    ahead = _prefetch(tile, in_use, schedule, b_args, epilogue, sizes, form, WARPGROUP)
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        following = tile_start(index + gl.num_programs(0), schedule, tiles, blocks_n, form.group_m)
        height = _height(ahead[0] - tile[1], form.heights)
        for i in gl.static_range(len(form.heights)):
            if height == form.heights[i]:
                turn, ahead = _tile(
                    turn,
                    tile,
                    ahead,
                    following,
                    in_use,
                    schedule,
                    b_args,
                    result,
                    epilogue,
                    ring,
                    own,
                    sizes,
                    form,
                    form.heights[i],
                    WARPGROUP,
                )
        tile = following


@gluon.jit
def _producer(x, w_desc, schedule, b_args, ring, sizes, K, form):
    """Request every tile that this CTA multiplies, as far ahead as there are free stages.

    Activations in sorted order are requested by descriptor. Rows by token are copied by four warps, 16 bytes per
    thread.
    """
    x_tiles, w_tiles, full, empty, s_tiles = ring
    tiles, blocks_n, steps, N, rows_per_expert = sizes
    HEIGHTS: gl.constexpr = form.heights
    GROUPS: gl.constexpr = form.groups
    PAIRED: gl.constexpr = b_args.scales.dtype.element_ty.primitive_bitwidth == 16
    # Rows of scales, or of pairs, per step.
    PER_STEP: gl.constexpr = s_tiles.shape[0] // full.shape[0]
    BOX: gl.constexpr = w_desc.block_shape[0]
    # Rows of a step that share a row of the matrix.
    SHARED: gl.constexpr = w_desc.block_shape[1] // WORDS
    BYTES: gl.constexpr = TILE * WORDS * 4
    if form.gathers:
        values, stride, per_row = x
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        place = gl.arange(0, HEIGHTS[0], layout=gl.SliceLayout(1, layout))
        column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, layout))
    s_layout: gl.constexpr = gl.BlockedLayout([8 // gl.num_warps()], [32], [gl.num_warps()], [0])
    scale_row = gl.arange(0, TILE, layout=s_layout)
    turn = 0
    for index in range(gl.program_id(0), tiles * blocks_n, gl.num_programs(0)):
        expert, start, end, block_n = locate_tile(index, schedule, tiles, blocks_n, form.group_m)
        row = expert * steps * rows_per_expert + block_n * TILE
        if form.gathers:
            token = gl.load(schedule[2] + gl.minimum(start + place, end - 1)) // per_row
            source = (values + token.to(gl.int64) * stride)[:, None] + column[None, :]
        height = _height(end - start, HEIGHTS)
        if GROUPS > 0:
            scales = b_args.scales
            if PAIRED:
                scales = word_pointers(scales)
            scales += expert.to(gl.int64) * b_args.scale_e + block_n * TILE + scale_row
            exists = block_n * TILE + scale_row < rows_per_expert
        for k in range(steps):
            slot = empty_slot(empty, turn)
            ready = full.index(slot)
            if form.gathers:
                mbarrier.expect(ready, BYTES)
            else:
                for i in gl.static_range(len(HEIGHTS)):
                    mbarrier.expect(ready, BYTES + HEIGHTS[i] * STEP * 2, pred=height == HEIGHTS[i])
            for part in gl.static_range(TILE // SHARED // BOX):
                target = w_tiles.index(slot).slice(part * BOX, BOX, 0)
                tma_load(w_desc, [(row + k * rows_per_expert) // SHARED + part * BOX, 0], ready, target)
            for i in gl.static_range(PER_STEP):
                # With one group per step, two consecutive steps use the same row of scale pairs.
                group = k // 2 if PAIRED and GROUPS == 1 else k * PER_STEP + i
                group = gl.minimum(group, b_args.groups - 1)
                copy_rows(s_tiles.index(slot * PER_STEP + i), scales + group * b_args.scale_g, mask=exists)
            if form.gathers:
                for half in gl.static_range(2):
                    inside = k * STEP + half * CHUNK + column < K
                    mask = (place < height)[:, None] & inside[None, :]
                    copy_rows(x_tiles.index(slot * 2 + half), source + half * CHUNK, mask=mask)
                source += STEP
            if form.gathers or GROUPS > 0:
                async_copy.mbarrier_arrive(ready, increment_count=False)
            if not form.gathers:
                LOW: gl.constexpr = x.block_shape[0]
                for box in gl.static_range(HEIGHTS[0] // LOW):
                    for half in gl.static_range(2):
                        target = x_tiles.index(slot * 2 + half).slice(box * LOW, LOW, 0)
                        at = [start + box * LOW, k * STEP + half * CHUNK]
                        tma_load(x, at, ready, target, pred=height > box * LOW)
            turn += 1


@gluon.jit
def words_kernel(
    x,
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
    """Persistent grouped GEMM of 4-bit words: one CTA per SM.

    GEMM1: out [P, width] = act(x w13^T + bias), rows in sorted order; gemm2: out[pair] = x w2^T + bias.

    - x [P, K] in sorted order, and w_desc [E * steps * rows_per_expert, words of a step], or with two such rows in one:
      descriptors. If the form `gathers`, x = (x [tokens, K], row stride, pairs of a token).
    - b_args, schedule, result and epilogue as in the tile kernel and its device functions
    - N: columns of the result, of one half if gated; form: `WordsForm`
    """
    begin_pdl(PDL)
    dtype: gl.constexpr = x[0].dtype.element_ty if form.gathers else x.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * 2, form.heights[0], CHUNK], x_layout)
    SHARED: gl.constexpr = w_desc.block_shape[1] // WORDS
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES, TILE // SHARED, SHARED * WORDS], w_desc.layout)
    row_layout: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    row_weights = gl.allocate_shared_memory(gl.float32, [CONSUMERS, form.heights[0]], row_layout)
    row_pairs = gl.allocate_shared_memory(gl.int32, [CONSUMERS, form.heights[0]], row_layout)
    of_rows = (row_weights, row_pairs)
    PRODUCERS: gl.constexpr = 129 if form.gathers else 33 if form.groups > 0 else 1
    full, empty = allocate_barriers(STAGES, PRODUCERS)
    PAIRED: gl.constexpr = b_args.scales.dtype.element_ty.primitive_bitwidth == 16
    PER_STEP: gl.constexpr = (form.groups + 1) // 2 if PAIRED else form.groups
    SCALES: gl.constexpr = STAGES * PER_STEP if PER_STEP > 0 else 1
    s_dtype: gl.constexpr = gl.int32 if PAIRED else b_args.scales.dtype.element_ty
    s_tiles = gl.allocate_shared_memory(s_dtype, [SCALES, TILE], row_layout)
    fence_async_shared()
    ring = (x_tiles, w_tiles, full, empty, s_tiles)
    tiles = gl.load(schedule[0])
    steps = gl.cdiv(K, STEP)
    blocks_n = gl.cdiv(rows_per_expert, TILE)
    sizes = (tiles, blocks_n, steps, N, rows_per_expert)
    gl.warp_specialize(
        [
            (_consumer, (schedule, b_args, result, epilogue, ring, of_rows, sizes, form, gl.constexpr(0))),
            (_consumer, (schedule, b_args, result, epilogue, ring, of_rows, sizes, form, gl.constexpr(1))),
            (_producer, (x, w_desc, schedule, b_args, ring, sizes, K, form)),
        ],
        [4, 4 if form.gathers else 1],
        [224 if form.gathers else 240, 56 if form.gathers else 24],
    )
