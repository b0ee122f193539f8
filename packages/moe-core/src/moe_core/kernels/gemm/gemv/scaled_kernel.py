"""GEMV for few tokens: 8-bit codes with row, matrix or block scales, 8-bit activations.

A CTA multiplies ROWS rows of one expert (gated: of each half) by the vector of one pair. In gemm2 it may instead
multiply ROWS rows of the experts of all pairs of a token, one warp group per pair, and sum the results. A warp reads
whole rows, 16 codes per thread. The codes of the next DEPTH steps are in flight to registers. Every CTA quantizes its
vectors into shared memory, so that no sort and no other launch is needed before.

int8 codes are multiplied four at a time (`dp4a`). e4m3 codes are multiplied in float16, two at a time, which is exact,
and a few products are summed there, with half the instructions of float32. Beyond that, sums equal those of the tile
kernel except for the order of float32 additions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.device.casts import divide, divide_all, saturate, scale_product
from moe_core.kernels.device.gluon import barrier, reinterpret
from moe_core.kernels.device.pdl import begin_pdl, wait_at_first
from moe_core.kernels.device.registers import split_last
from moe_core.kernels.gemm.tiles.finalize import finalize_pairs
from moe_core.kernels.gemm.tiles.scaled_mm import scale_of_codes
from moe_core.kernels.gemm.tiles.schedule import expert_of, locate_vector
from moe_core.kernels.gemm.tiles.tile_kernel import finish_tile
from moe_core.kernels.ops._quantize_kernels import INFINITY_BITS, magnitude_bits

# Columns of a block of block-major weights.
BLOCK = gl.constexpr(128)
# Factor of the vector's e4m3 values: products then fit float16, and so does a sum of eight of the largest.
SMALLER = gl.constexpr(2.0**-5)


class ScaledGemvForm(NamedTuple):
    """Compile-time parameters of the kernel.

    Attributes:
        codes: A tensor of the codes' dtype, int8 or e4m3.
        summed: Number of e4m3 products (1 to 8) that are summed in float16 before float32; 1 is exact.
        quantize: Function of the tile kernel's form for groups of ``group`` columns of the vector; None for one scale
            per vector.
        group: Columns per group; 0 for one scale per vector.
        x_scales: [E] static scales of the activations, or None.
    """

    codes: Any
    summed: gl.constexpr
    quantize: Any
    group: gl.constexpr
    x_scales: Any


@gluon.jit
def _load_vectors(vectors, first, VECTORS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """float32 TILE of `vectors` = (x, its row stride, K), from row `first` on.

    Row r is step r / VECTORS of vector r % VECTORS.
    """
    x, stride_x, K = vectors
    row = first + gl.arange(0, TILE[0], layout=gl.SliceLayout(1, layout))
    column = (row // VECTORS)[:, None] * TILE[1] + gl.arange(0, TILE[1], layout=gl.SliceLayout(0, layout))[None, :]
    at = x + (row % VECTORS * stride_x)[:, None] + column
    return gl.load(at, mask=column < K, other=0.0).to(gl.float32)


@gluon.jit
def _row_scales(vectors, expert, form, STEPS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr):
    """Scales of whole vectors, in the shape and layout of `expert` [vectors].

    They are static, or found from the largest magnitudes; NaN where codes cannot represent NaN.
    """
    if form.x_scales is not None and form.codes.dtype.element_ty != gl.int8:
        return gl.load(form.x_scales + expert)
    else:
        VECTORS: gl.constexpr = expert.shape[0]
        bits = gl.zeros(TILE, gl.int32, layout)
        for row in range(0, STEPS * VECTORS, TILE[0]):
            bits = gl.maximum(bits, magnitude_bits(_load_vectors(vectors, row, VECTORS, TILE, layout)))
        of_rows = gl.max(bits, axis=1)
        most = gl.max(of_rows.reshape([TILE[0] // VECTORS, VECTORS]), axis=0)
        most = gl.convert_layout(most, expert.type.layout)
        if form.x_scales is None:
            return scale_of_codes(most, form.codes)
        else:
            return gl.where(most > INFINITY_BITS, float("nan"), gl.load(form.x_scales + expert))


@gluon.jit
def _store_vectors(
    shared, vectors, scales, form, STEPS: gl.constexpr, VECTORS: gl.constexpr, TILE: gl.constexpr, layout: gl.constexpr
):
    """Quantize the vectors into shared memory.

    shared[0] receives the codes, as words of int8 or of float16; shared[1] the scales of groups.
    """
    LANES: gl.constexpr = TILE[1] // 16
    of_rows = scales
    if form.group == 0:
        of_rows = gl.convert_layout(scales, gl.SliceLayout(0, layout))[None, :]
        of_rows = of_rows.broadcast_to([TILE[0] // VECTORS, VECTORS]).reshape([TILE[0]])
        of_rows = gl.convert_layout(of_rows, gl.SliceLayout(1, layout))[:, None]
    for row in range(0, STEPS * VECTORS, TILE[0]):
        values = _load_vectors(vectors, row, VECTORS, TILE, layout)
        if form.group != 0:
            GROUPS: gl.constexpr = TILE[1] // form.group
            groups = values.reshape([TILE[0] * GROUPS, form.group])
            codes, of_groups = form.quantize(groups, (form.codes,), 0, 1)
            # One scale for each thread that multiplies its columns.
            of_groups = gl.expand_dims(of_groups, 1).broadcast_to([TILE[0] * GROUPS, LANES // GROUPS])
            shared[1].index(row // TILE[0]).store(of_groups.reshape([TILE[0], LANES]))
            codes = codes.reshape(TILE)
        elif form.x_scales is None:
            codes = saturate(divide(values, of_rows), form.codes)
        else:
            codes = saturate(divide_all(values, of_rows), form.codes)
        target = shared[0].index(row // TILE[0])
        if form.codes.dtype.element_ty == gl.int8:
            a, b, c, d = split_last((codes.to(gl.int32) & 0xFF).reshape([TILE[0], 4 * LANES, 4]))
            target.store(a | (b << 8) | (c << 16) | (d << 24))
        else:
            # Two words at a time, those of all threads adjacent: 16 consecutive values per thread would
            # cause bank conflicts.
            numbers = (codes.to(gl.float32) * SMALLER).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
            low, high = gl.split(numbers.reshape([TILE[0] // VECTORS, VECTORS, LANES, 2, 4, 2]))
            words = (low | (high << 16)).permute([0, 3, 1, 2, 4])
            target.store(words.reshape([TILE[0] * 2, 4 * LANES]))


@gluon.jit
def _of_thread(x, layout: gl.constexpr):
    """[..., 4 * LANES] as four [..., LANES] in `layout`: a thread holds four in a row."""
    found = ()
    for part in gl.static_range(4):
        values = split_last(x.reshape(x.shape[:-1] + [x.shape[-1] // 4, 4]))[part]
        found += (gl.convert_layout(values, layout, assert_trivial=True),)
    return found


@gluon.jit
def _by_vector(shared, VECTORS: gl.constexpr):
    """[A, B, C] of shared memory as [A * B / VECTORS, VECTORS, C]."""
    SHAPE: gl.constexpr = [shared.shape[0] * shared.shape[1] // VECTORS, VECTORS, shared.shape[2]]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret(shared, shared.dtype, SHAPE, layout)


@gluon.jit
def _vectors_of(shared, step, form, VECTORS: gl.constexpr, layout: gl.constexpr):
    """(the vector's words for each word of codes, scales) of a step.

    The words are [VECTORS, LANES], one of int8 or two of float16. Scales are [VECTORS, LANES], or 1 where there are
    none.
    """
    own: gl.constexpr = gl.SliceLayout(1, layout)
    four: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([1, 1, 4], layout.threads_per_warp, layout.warps_per_cta, [2, 1, 0])
    )
    at = _by_vector(shared[0], VECTORS)
    numbers = ()
    if form.codes.dtype.element_ty == gl.int8:
        words = _of_thread(at.index(step).load(four), own)
        for word in gl.static_range(4):
            numbers += ((words[word],),)
    else:
        for two in gl.static_range(2):
            a, b, c, d = _of_thread(at.index(step * 2 + two).load(four), own)
            numbers += ((a, b), (c, d))
    if form.group == 0:
        return numbers, 1.0
    else:
        return numbers, _by_vector(shared[1], VECTORS).index(step).load(own)


@gluon.jit
def _multiply_add(INSTRUCTION: gl.constexpr, words, x, acc):
    """acc + `words` [VECTORS, ROWS, LANES] * x [VECTORS, LANES], by INSTRUCTION."""
    x = gl.expand_dims(x, 1).broadcast_to(acc.shape)
    asm: gl.constexpr = INSTRUCTION + " $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(asm, "=r,r,r,r", [words, x, acc], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _widen(word):
    """The four e4m3 values of a word as float16, two per word."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 a, b;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
        }
        """,
        "=&r,=r,r",
        [word],
        dtype=[gl.int32, gl.int32],
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _both(sums):
    """The float32 sum of the two float16 values of a word."""
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        "=f,=f,r",
        [sums],
        dtype=[gl.float32, gl.float32],
        is_pure=True,
        pack=1,
    )
    return low + high


@gluon.jit
def _add(acc, words, factor, x, layout: gl.constexpr, form):
    """acc [VECTORS, ROWS, LANES] + products of `words` and a step of the vectors.

    With groups, the products are scaled by `factor`.
    """
    numbers, scale = x
    words = _of_thread(words, layout)
    INTEGERS: gl.constexpr = form.codes.dtype.element_ty == gl.int8
    part = acc if form.group == 0 else gl.zeros_like(acc)
    sums = gl.zeros(acc.shape, gl.int32, layout)
    for word in gl.static_range(4):
        if INTEGERS:
            part = _multiply_add("dp4a.s32.s32", words[word], numbers[word][0], part)
        else:
            twos = _widen(words[word])
            for half in gl.static_range(2):
                sums = _multiply_add("fma.rn.f16x2", twos[half], numbers[word][half], sums)
                if (2 * word + half) % form.summed == form.summed - 1:
                    part += _both(sums)
                    sums = gl.zeros(acc.shape, gl.int32, layout)
    if form.group == 0:
        return part
    else:
        both = scale_product(scale, factor)
        return gl.fma(part, gl.expand_dims(both, 1).broadcast_to(acc.shape), acc)


@gluon.jit
def _load_step(pointers, factors, step, column, lane, local, K, stride_k, form):
    """(words of each half's rows, weight scales of the lanes' groups) of a step.

    Words without a `local` expert are 0.
    """
    words = ()
    scales = ()
    for half in gl.static_range(len(pointers)):
        at = pointers[half] + step * (column.shape[0] // (BLOCK // 4)) * (stride_k // 4)
        mask = gl.expand_dims((column < K // 4 - step * column.shape[0])[None, :], 0)
        if local is not None:
            mask = mask & local
        words += (gl.load(at, mask=mask, other=0),)
        if form.group != 0:
            first, groups = factors[half]
            group = (step * lane.shape[0] + lane) * 16 // form.group
            scales += (gl.load(first + gl.minimum(group, groups - 1)[None, :]),)
        else:
            scales += (1.0,)
    return words, scales


@gluon.jit
def _per_vector(x, layout: gl.constexpr):
    """x [vectors] as [vectors, 1, 1] in `layout`."""
    x = gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


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
    ROWS: gl.constexpr,
    LANES: gl.constexpr,
    DEPTH: gl.constexpr,
    STEPS: gl.constexpr,
    VECTORS: gl.constexpr,
    SECOND: gl.constexpr,
    ALONG_M: gl.constexpr,
    PDL: gl.constexpr,
):
    """out[pair] = epilogue(w x[row]), N columns (of a half).

    - One CTA per pair and ROWS rows of w
    - row_args, SECOND and ALONG_M as in `locate_vector`, result and epilogue as in the tile kernel
    - VECTORS > 0, of gemm2: one CTA per token and ROWS rows, for all its VECTORS pairs, which it sums: out[token]; each
      warp group takes one pair
    - K is a multiple of 16
    - b_args as in `open_weights` of `moe_core.kernels.gemm.tiles.scaled_mm`, with steps of 128 columns. If columns have
      groups: (weights, scales [E, rows of blocks, groups], the same strides of weights, scales' expert and row stride,
      rows of a block (a constant)); gate and up each end with their own last row of blocks
    - LANES threads read a row, 16 columns each; STEPS such steps cover K
    """
    begin_pdl(PDL and not SECOND)
    HALVES: gl.constexpr = 2 if epilogue.gated else 1
    WARPS: gl.constexpr = gl.num_warps()
    PAIRS: gl.constexpr = VECTORS if VECTORS > 0 else 1
    # Layouts of a thread's words, of its sums, and of 16 values of the vector.
    THREADS: gl.constexpr = [1, 32 // LANES, LANES]
    OF_WARPS: gl.constexpr = [PAIRS, WARPS // PAIRS, 1]
    tile: gl.constexpr = gl.BlockedLayout([1, 1, 4], THREADS, OF_WARPS, [2, 1, 0])
    summed: gl.constexpr = gl.BlockedLayout([1, 1, 1], THREADS, OF_WARPS, [2, 1, 0])
    vector: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    of_pairs: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, summed))
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, summed))
    VECTOR_ROWS: gl.constexpr = 32 // LANES * WARPS
    VECTOR: gl.constexpr = [VECTOR_ROWS, 16 * LANES]
    INTEGERS: gl.constexpr = form.codes.dtype.element_ty == gl.int8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNS: gl.constexpr = (STEPS * PAIRS + VECTOR_ROWS - 1) // VECTOR_ROWS
    shared = (
        gl.allocate_shared_memory(gl.int32, [TURNS, VECTOR_ROWS if INTEGERS else 2 * VECTOR_ROWS, 4 * LANES], plain),
        gl.allocate_shared_memory(gl.float32, [TURNS if form.group != 0 else 1, VECTOR_ROWS, LANES], plain),
    )
    first_pair, vector_row, block, own_expert = locate_vector(row_args, gl.cdiv(N, ROWS), SECOND, ALONG_M)
    local = None
    if VECTORS > 0:
        # CTAs are numbered by token.
        first_pair *= PAIRS
        vector_row = first_pair
        pair = first_pair + gl.arange(0, PAIRS, layout=of_pairs)
        expert = expert_of(pair, pair >= 0, row_args, "pairs")
        exists = expert >= 0
        expert = gl.maximum(expert, 0)
        local = _per_vector(exists, tile)
    else:
        if own_expert < 0:
            wait_at_first(PDL and SECOND)
            return
        expert = own_expert + gl.arange(0, 1, layout=of_pairs)
    weights, scales, stride_e, stride_n, stride_k, scale_e, scale_half, scale_n = b_args
    # Rows of a block, where columns have groups.
    BLOCK_N: gl.constexpr = b_args[7] if form.group != 0 else 1
    column = gl.arange(0, 4 * LANES, layout=gl.SliceLayout(0, gl.SliceLayout(0, tile)))
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, summed)))
    row = gl.minimum(block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, tile))), N - 1)
    columns = block * ROWS + gl.arange(0, ROWS, layout=of_rows)
    place = (
        row.to(gl.int64)[:, None] * (stride_n // 4)
        + (column // (BLOCK // 4) * (stride_k // 4) + column % (BLOCK // 4))[None, :]
    )
    base = scales + expert.to(gl.int64) * scale_e
    starts = weights + _per_vector(expert, tile).to(gl.int64) * stride_e
    pointers = ()
    sums = ()
    factors = ()
    for half in gl.static_range(HALVES):
        first = (starts + half * N.to(gl.int64) * stride_n).to(gl.pointer_type(gl.int32))
        pointers += (first + gl.expand_dims(place, 0),)
        sums += (gl.zeros([PAIRS, ROWS, LANES], gl.int32 if INTEGERS else gl.float32, summed),)
        if form.group != 0:
            block_row = block * ROWS // BLOCK_N + half * gl.cdiv(N, BLOCK_N)
            of_block = gl.convert_layout(base + block_row * scale_half, gl.SliceLayout(1, gl.SliceLayout(1, summed)))
            factors += ((of_block[:, None], gl.cdiv(K, form.group)),)
        else:
            at = (base + half * scale_half)[:, None] + (gl.minimum(columns, N - 1) * scale_n)[None, :]
            factors += (gl.load(at),)
    ring = ()
    for step in gl.static_range(DEPTH):
        ring += (_load_step(pointers, factors, step, column, lane, local, K, stride_k, form),)
    begin_pdl(PDL and SECOND)
    vectors = (x + vector_row * stride_x, stride_x, K)
    scale = _row_scales(vectors, expert, form, STEPS, VECTOR, vector) if form.group == 0 else 0.0
    _store_vectors(shared, vectors, scale, form, STEPS, PAIRS, VECTOR, vector)
    barrier()
    for k in range(0, STEPS, DEPTH):
        following = ()
        for step in gl.static_range(DEPTH):
            # Beyond the last step the weights are zeros.
            numbers = _vectors_of(shared, gl.minimum(k + step, STEPS - 1), form, PAIRS, summed)
            words, scales_of_step = ring[step]  # type: ignore[var-annotated]
            new = ()
            for half in gl.static_range(HALVES):
                new += (_add(sums[half], words[half], scales_of_step[half], numbers, summed, form),)
            sums = new
            # Load into the registers that this step has freed.
            following += (_load_step(pointers, factors, k + step + DEPTH, column, lane, local, K, stride_k, form),)
        ring = following
    found = ()
    for half in gl.static_range(HALVES):
        value = gl.sum(sums[half], axis=2).to(gl.float32)
        if not INTEGERS:
            value *= 1 / SMALLER
        if form.group == 0:
            value *= scale[:, None] * factors[half]  # type: ignore[index]
        found += (value,)
    if VECTORS > 0:
        sums_of_pairs = found[0]  # type: ignore[misc]
        finalize_pairs(sums_of_pairs, epilogue, result, N, expert, exists, pair, first_pair // PAIRS, columns)
    else:
        value = found[0].reshape([ROWS, 1])  # type: ignore[misc]
        up = found[HALVES - 1].reshape([ROWS, 1])  # type: ignore[var-annotated]
        layout: gl.constexpr = value.type.layout
        one = gl.arange(0, 1, layout=gl.SliceLayout(0, layout))
        target = first_pair + one
        columns = block * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        finish_tile(value, up, epilogue, result, N, own_expert, target, target, one == 0, block, columns, True, False)
