"""GEMV for few tokens of 8-bit codes with scales of rows, matrices or blocks, and activations of 8 bits.

A program multiplies ROWS rows of one expert (gated: of each half) by the vector of one pair.  A warp reads whole rows,
16 codes a thread; the codes of the next DEPTH steps are on their way to registers.  Every program quantises the vector
by itself, into shared memory, so that there is neither a sort nor a launch before.

Codes of int8 are multiplied four at a time (`dp4a`), those of e4m3 in float32.  Sums are those of the tile kernel but
for the order in which float32 is added up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.gemm.hopper_pipeline import barrier
from moe_core.gemm.marlin.dequant import split_last
from moe_core.gemm.scaled_mm import INFINITY_BITS, saturate, scale_of_codes
from moe_core.gemm.schedule import locate_vector
from moe_core.gemm.tile_kernel import finish_tile
from moe_core.jit.casts import divide, divide_all
from moe_core.jit.pdl import begin_pdl
from moe_core.ops._quantize_kernels import magnitude_bits

# the name of Triton 3.6, where a newer one is missing
_DESCRIPTOR = gl.shared_memory_descriptor
reinterpret = _DESCRIPTOR.reinterpret if hasattr(_DESCRIPTOR, "reinterpret") else _DESCRIPTOR._reinterpret

# columns of a block of block-major weights
BLOCK = gl.constexpr(128)
FLOAT32_MAX = gl.constexpr(3.4028234663852886e38)
NAN = gl.constexpr(tl.PropagateNan.ALL)


class ScaledGemvForm(NamedTuple):
    """What the kernel is compiled for.

    - ``codes``: a tensor of the codes' type, int8 or e4m3
    - ``quantize``: of the tile kernel's form, for groups of ``group`` columns of the vector; None, and 0: one scale for
      all of it
    """

    codes: Any
    quantize: Any
    group: gl.constexpr


@gluon.jit
def _load_vector(x, step, K, TILE: gl.constexpr, layout: gl.constexpr):
    """TILE columns of the vector from step `step` on, [rows, columns of a step], float32."""
    row = step + gl.arange(0, TILE[0], layout=gl.SliceLayout(1, layout))
    column = row[:, None] * TILE[1] + gl.arange(0, TILE[1], layout=gl.SliceLayout(0, layout))[None, :]
    return gl.load(x + column, mask=column < K, other=0.0).to(gl.float32)


@gluon.jit
def _row_scale(x, x_scales, K, expert, codes, STEPS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """The scale of the whole vector: static, or found from its largest magnitude; NaN where codes can't say NaN."""
    if x_scales is not None and codes.dtype.element_ty != gl.int8:
        return gl.load(x_scales + expert)
    else:
        bits = gl.zeros(TILE, gl.int32, layout)
        for step in range(0, STEPS, TILE[0]):
            bits = gl.maximum(bits, magnitude_bits(_load_vector(x, step, K, TILE, layout)))
        most = gl.max(gl.max(bits, axis=1), axis=0)
        if x_scales is None:
            return scale_of_codes(most, codes)
        else:
            return gl.where(most > INFINITY_BITS, float("nan"), gl.load(x_scales + expert))


@gluon.jit
def _store_vector(shared, x, x_scales, scale, K, form, STEPS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """Quantise the vector: codes to shared[0], as float32 or int8 words, and scales of groups to shared[1]."""
    LANES: gl.constexpr = TILE[1] // 16
    for step in range(0, STEPS, TILE[0]):
        values = _load_vector(x, step, K, TILE, layout)
        if form.group != 0:
            GROUPS: gl.constexpr = TILE[1] // form.group
            groups = values.reshape([TILE[0] * GROUPS, form.group])
            codes, scales = form.quantize(groups, (form.codes,), 0, 1)
            # one for each thread that multiplies its columns
            scales = gl.expand_dims(scales, 1).broadcast_to([TILE[0] * GROUPS, LANES // GROUPS])
            shared[1].index(step // TILE[0]).store(scales.reshape([TILE[0], LANES]))
            codes = codes.reshape(TILE)
        elif x_scales is None:
            codes = saturate(divide(values, scale), form.codes)
        else:
            codes = saturate(divide_all(values, scale), form.codes)
        target = shared[0].index(step // TILE[0])
        if form.codes.dtype.element_ty == gl.int8:
            a, b, c, d = split_last((codes.to(gl.int32) & 0xFF).reshape([TILE[0], 4 * LANES, 4]))
            target.store(a | (b << 8) | (c << 16) | (d << 24))
        else:
            # word by word, those of all threads side by side: 16 numbers of a thread in a row would conflict
            words = codes.to(gl.float32).reshape([TILE[0], LANES, 4, 4]).permute([0, 2, 1, 3])
            target.store(words.reshape([TILE[0] * 4, 4 * LANES]))


@gluon.jit
def _of_thread(x, layout: gl.constexpr):
    """[..., 4 * LANES] as four [..., LANES] in `layout`: what a thread has four of in a row."""
    found = ()
    for part in gl.static_range(4):
        values = split_last(x.reshape(x.shape[:-1] + [x.shape[-1] // 4, 4]))[part]
        found += (gl.convert_layout(values, layout, assert_trivial=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def _flattened(shared):
    """[A, B, C] of shared memory as [A * B, C]."""
    SHAPE: gl.constexpr = [shared.shape[0] * shared.shape[1], shared.shape[2]]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(shared, shared.dtype, SHAPE, layout)


@gluon.jit
def _vector_of(shared, step, form, ROWS: gl.constexpr, layout: gl.constexpr):
    """(four float32 [LANES] of each word, or of int8 its word; scales [LANES], 1 where there are none) of a step."""
    own: gl.constexpr = gl.SliceLayout(0, layout)
    four: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 4], layout.threads_per_warp, layout.warps_per_cta, [1, 0])
    )
    PARTS: gl.constexpr = shared[0].shape[1] // ROWS
    at = _flattened(shared[0])
    numbers = ()
    if form.codes.dtype.element_ty == gl.int8:
        words = _of_thread(at.index(step).load(four), own)
        for word in gl.static_range(4):
            numbers += ((words[word],),)  # type: ignore[assignment]
    else:
        for word in gl.static_range(4):
            numbers += (_of_thread(at.index(step * PARTS + word).load(four), own),)  # type: ignore[assignment]
    if form.group == 0:
        return numbers, 1.0
    else:
        return numbers, _flattened(shared[1]).index(step).load(own)


@gluon.jit
def _add_word(acc, word, x):
    """acc + products of the four codes of `word` [ROWS, LANES]."""
    if len(x) == 1:
        return gl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [word, gl.expand_dims(x[0], 0), acc],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        numbers = gl.inline_asm_elementwise(
            """
            {
                .reg .b16 a, b, c, d;
                .reg .b32 low, high;
                mov.b32 {a, b}, $4;
                cvt.rn.f16x2.e4m3x2 low, a;
                cvt.rn.f16x2.e4m3x2 high, b;
                mov.b32 {a, b}, low;
                mov.b32 {c, d}, high;
                cvt.f32.f16 $0, a;
                cvt.f32.f16 $1, b;
                cvt.f32.f16 $2, c;
                cvt.f32.f16 $3, d;
            }
            """,
            "=&f,=&f,=&f,=&f,r",
            [word],
            dtype=[gl.float32, gl.float32, gl.float32, gl.float32],
            is_pure=True,
            pack=1,
        )
        for i in gl.static_range(4):
            acc = gl.fma(numbers[i], gl.expand_dims(x[i], 0).broadcast_to(acc.shape), acc)
        return acc


@gluon.jit
def _add(acc, words, factor, x, layout: gl.constexpr, form):
    """acc [ROWS, LANES] + products of `words` [ROWS, 4 * LANES] and a step of the vector, times `factor` of groups."""
    numbers, scale = x
    words = _of_thread(words, layout)
    if form.group == 0:
        for word in gl.static_range(4):
            acc = _add_word(acc, words[word], numbers[word])
        return acc
    else:
        part = gl.zeros(acc.shape, gl.float32, layout)
        for word in gl.static_range(4):
            part = _add_word(part, words[word], numbers[word])
        # never infinity: weights of zero may have any scale, and 0 * infinity is no number
        both = gl.minimum(scale * factor, FLOAT32_MAX, propagate_nan=NAN)
        return gl.fma(part, gl.expand_dims(both, 0).broadcast_to(acc.shape), acc)


@gluon.jit
def _load_step(pointers, factors, step, column, lane, K, stride_k, form):
    """(words of each half's rows, weight scales of the lanes' groups) of a step."""
    words = ()
    scales = ()
    for half in gl.static_range(len(pointers)):
        at = pointers[half] + step * (column.shape[0] // (BLOCK // 4)) * (stride_k // 4)
        mask = (column < K // 4 - step * column.shape[0])[None, :]
        words += (gl.load(at, mask=mask, other=0),)  # type: ignore[assignment]
        if form.group != 0:
            first, groups = factors[half]
            group = (step * lane.shape[0] + lane) * 16 // form.group
            scales += (gl.load(first + gl.minimum(group, groups - 1)),)  # type: ignore[assignment]
        else:
            scales += (1.0,)  # type: ignore[assignment]
    return words, scales


@gluon.jit
def scaled_gemv_kernel(
    result,
    x,
    stride_x,
    b_args,
    row_args,
    epilogue,
    N,
    K,
    form,
    x_scales,
    ROWS: gl.constexpr,
    LANES: gl.constexpr,
    DEPTH: gl.constexpr,
    STEPS: gl.constexpr,
    SECOND: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[pair] = epilogue(w x[row]), N columns (of a half); programs by pair and ROWS rows of w.

    - row_args and SECOND as in `locate_vector`, result and epilogue as in the tile kernel
    - x_scales [E] of static activations, or None; K is a multiple of 16
    - b_args as `open_weights` of `moe_core.gemm.scaled_mm` has them, with steps of 128 columns; where columns have
      groups (weights, scales [E, rows of blocks, groups], the same strides of weights, scales' expert and row stride,
      rows of a block, a constant), gate and up each with its own last row of blocks
    - LANES threads read a row, 16 columns each: K is STEPS times as many
    """
    begin_pdl(PDL and not SECOND)
    HALVES: gl.constexpr = 2 if epilogue.gated else 1
    WARPS: gl.constexpr = gl.num_warps()
    # words of a thread, its sums, and 16 numbers of the vector
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    summed: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    vector: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    VECTOR_ROWS: gl.constexpr = 32 // LANES * WARPS
    VECTOR: gl.constexpr = [VECTOR_ROWS, 16 * LANES]
    INTEGERS: gl.constexpr = form.codes.dtype.element_ty == gl.int8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNS: gl.constexpr = (STEPS + VECTOR_ROWS - 1) // VECTOR_ROWS
    shared = (
        gl.allocate_shared_memory(
            gl.int32 if INTEGERS else gl.float32,
            [TURNS, VECTOR_ROWS if INTEGERS else 4 * VECTOR_ROWS, 4 * LANES],
            plain,
        ),
        gl.allocate_shared_memory(gl.float32, [TURNS if form.group != 0 else 1, VECTOR_ROWS, LANES], plain),
    )
    pair, vector_row, block, expert = locate_vector(row_args, gl.cdiv(N, ROWS), SECOND)
    if expert < 0:
        return
    weights, scales, stride_e, stride_n, stride_k, scale_e, scale_half, scale_n = b_args
    # of groups
    BLOCK_N: gl.constexpr = b_args[7] if form.group != 0 else 1
    column = gl.arange(0, 4 * LANES, layout=gl.SliceLayout(0, tile))
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, summed))
    row = gl.minimum(block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, tile)), N - 1)
    columns = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, summed))
    place = (
        row.to(gl.int64)[:, None] * (stride_n // 4)
        + (column // (BLOCK // 4) * (stride_k // 4) + column % (BLOCK // 4))[None, :]
    )
    base = scales + expert.to(gl.int64) * scale_e
    pointers = ()
    sums = ()
    factors = ()
    for half in gl.static_range(HALVES):
        first = weights + expert.to(gl.int64) * stride_e + half * N.to(gl.int64) * stride_n
        pointers += (first.to(gl.pointer_type(gl.int32)) + place,)  # type: ignore[assignment]
        sums += (gl.zeros([ROWS, LANES], gl.int32 if INTEGERS else gl.float32, summed),)  # type: ignore[assignment]
        if form.group != 0:
            block_row = block * ROWS // BLOCK_N + half * gl.cdiv(N, BLOCK_N)
            factors += ((base + block_row * scale_half, gl.cdiv(K, form.group)),)  # type: ignore[assignment]
        else:
            factors += (gl.load(base + half * scale_half + gl.minimum(columns, N - 1) * scale_n),)  # type: ignore[assignment]
    ring = ()
    for step in gl.static_range(DEPTH):
        ring += (_load_step(pointers, factors, step, column, lane, K, stride_k, form),)  # type: ignore[assignment]
    begin_pdl(PDL and SECOND)
    x += vector_row * stride_x
    scale = 0.0
    if form.group == 0:
        scale = _row_scale(x, x_scales, K, expert, form.codes, STEPS, VECTOR, vector)
    _store_vector(shared, x, x_scales, scale, K, form, STEPS, VECTOR, vector)
    barrier()
    for k in range(0, STEPS, DEPTH):
        following = ()
        for step in gl.static_range(DEPTH):
            # behind the last step there are zeros of the weights
            numbers = _vector_of(shared, gl.minimum(k + step, STEPS - 1), form, VECTOR_ROWS, summed)
            words, scales_of_step = ring[step]  # type: ignore[var-annotated]
            new = ()
            for half in gl.static_range(HALVES):
                new += (_add(sums[half], words[half], scales_of_step[half], numbers, summed, form),)  # type: ignore[assignment]
            sums = new
            # into the registers that this step has left
            following += (_load_step(pointers, factors, k + step + DEPTH, column, lane, K, stride_k, form),)  # type: ignore[assignment]
        ring = following
    found = ()
    for half in gl.static_range(HALVES):
        value = gl.sum(sums[half], axis=1).to(gl.float32)
        if form.group == 0:
            value *= scale * factors[half]
        found += (gl.expand_dims(value, 1),)  # type: ignore[assignment]
    one = gl.arange(0, 1, layout=gl.SliceLayout(0, summed))
    target = pair + one
    finish_tile(
        found[0],  # type: ignore[misc]
        found[HALVES - 1],
        epilogue,
        result,
        N,
        expert,
        target,
        target,
        one == 0,
        block,
        columns,
        True,
        False,
    )
