"""GEMV for few tokens by `mma.sync`: words are loaded into registers as its left operand.

Each of four warps multiplies 16 rows of 128 columns per step, by `moe_core.kernels.gemm.sm90.fragment_order`. PARTS of
the warps take the same rows and share their columns: step k has the units k * PARTS .. (k + 1) * PARTS - 1 of 128
columns, one per warp. The right operand has eight columns. Column c holds the vector's values for part c % PARTS. So
all warps have the same right operand, and each finds its sums in the column of its part.

The loop over steps is unrolled: the words of DEPTH steps are in flight while those before them are multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_core.kernels.device.pdl import begin_pdl, wait_at_first
from moe_core.kernels.gemm.sm90.fragment_order import (
    ROW_LAYOUT,
    ROWS,
    STEP,
    WORD_LAYOUT,
    WORDS,
    numbers_of,
    quarters,
)
from moe_core.kernels.gemm.tiles.finalize import store_zeros
from moe_core.kernels.gemm.tiles.schedule import locate_vector
from moe_core.kernels.gemm.tiles.tile_kernel import deinterleave, finish_tile

# Columns of the right operand.
COLUMNS = gl.constexpr(8)
# Sums [64, 8].
MMA_SYNC = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
# Eight consecutive values per thread.
X_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# 16 bytes of eight rows are in different banks.
X_TILE = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))


class MmaForm(NamedTuple):
    """Compile-time parameters of the kernel: constants, and a device function.

    Attributes:
        parts: Number of warps (1, 2 or 4) that share the columns of the same rows.
        groups: Groups of a step, not 0; see `moe_core.kernels.gemm.marlin.weight.WordFunctions`.
        dequantize: Device function; see `moe_core.kernels.gemm.marlin.weight.WordFunctions`.
    """

    parts: gl.constexpr
    groups: gl.constexpr
    dequantize: Any


@gluon.jit
def _rows(first, last, PARTS: gl.constexpr, layout: gl.constexpr):
    """(weight row, part of K) for each of a CTA's 64 rows; rows beyond `last` repeat it."""
    place = gl.arange(0, ROWS, layout=layout)
    return gl.minimum(first + place // (16 * PARTS) * 16 + place % 16, last), place // 16 % PARTS


@gluon.jit
def _load_steps(state, b_args, form, FIRST: gl.constexpr, END: gl.constexpr, LAST: gl.constexpr):
    """Words [64, 16] of steps FIRST to END, and scales of their groups.

    In step LAST, the words of a part without further columns are undefined.
    """
    words, part, scales, scale_part, units = state
    found = ()
    for k in gl.static_range(FIRST, END):
        pointers = words + k * form.parts * b_args.stride_k
        if k == LAST:
            tile = gl.load(pointers, mask=(part < units - k * form.parts)[:, None])
        else:
            tile = gl.load(pointers)
        of_step = ()
        for i in gl.static_range(form.groups):
            group = gl.minimum((k * form.parts + scale_part) * form.groups + i, b_args.groups - 1)
            of_step += (gl.load(scales + group * b_args.scale_g),)
        found += ((tile, of_step),)
    return found


@gluon.jit
def _stay(any_number):
    """Keep earlier loads before this point.

    ptxas would delay them until shortly before the words are needed.
    """
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [any_number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _share(x, K, STEPS: gl.constexpr, PARTS: gl.constexpr):
    """The values of x in shared memory: [8, 128] per step, zeros beyond K."""
    row = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, X_LAYOUT))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, X_LAYOUT))
    first = (row % PARTS * STEP)[:, None] + column[None, :]
    values = ()
    for k in gl.static_range(STEPS):
        at = first + k * PARTS * STEP
        values += (gl.load(x + at, mask=at < K, other=0.0),)
    tiles = ()
    for k in gl.static_range(STEPS):
        # Separate tiles: writing to one does not wait for another.
        tile = gl.allocate_shared_memory(x.dtype.element_ty, [COLUMNS, STEP], X_TILE, values[k])
        tiles += (tile,)
    return tiles


@gluon.jit
def _row_sums(sums, PARTS: gl.constexpr):
    """[64 / PARTS, 1] from the sums [64, 8], of which each warp uses the column of its part."""
    _, part = _rows(0, ROWS, PARTS, gl.SliceLayout(1, MMA_SYNC))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, MMA_SYNC))
    own = gl.sum(gl.where(column[None, :] == part[:, None], sums, 0.0), axis=1)
    return gl.sum(own.reshape([4 // PARTS, PARTS, 16]), axis=1).reshape([ROWS // PARTS, 1])


@gluon.jit
def gemv_mma_kernel(
    result,
    x,
    stride_x,
    b_args,
    row_args,
    epilogue,
    N,
    K,
    form,
    STEPS: gl.constexpr,
    DEPTH: gl.constexpr,
    EVEN: gl.constexpr,
    SECOND: gl.constexpr,
    ALONG_M: gl.constexpr,
    FINALIZE: gl.constexpr,
    PDL: gl.constexpr,
):
    """`moe_core.kernels.gemm.marlin._gemv_kernels.gemv_kernel` by `mma.sync`.

    One CTA per pair and 64 / parts rows of w.

    - form: `MmaForm`
    - STEPS of 128 * parts columns, DEPTH of which are prefetched; EVEN: the last step is whole
    - SECOND: the first words are loaded into registers while the previous launch produces x
    """
    begin_pdl(PDL and not SECOND)
    HEIGHT: gl.constexpr = ROWS // form.parts
    rows_all = gl.cdiv(N, 8) * 16 if epilogue.gated else N
    pair, vector, block, expert = locate_vector(row_args, gl.cdiv(rows_all, HEIGHT), SECOND, ALONG_M)
    if expert < 0:
        wait_at_first(PDL and SECOND)
        if FINALIZE:
            places: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            store_zeros(result, N, pair, block * HEIGHT + gl.arange(0, HEIGHT, layout=places))
        return
    base = expert.to(gl.int64)
    row, part = _rows(block * HEIGHT, rows_all - 1, form.parts, gl.SliceLayout(1, WORD_LAYOUT))
    word = part[:, None] * b_args.stride_k + gl.arange(0, WORDS, layout=gl.SliceLayout(0, WORD_LAYOUT))[None, :]
    words = b_args.words + base * b_args.stride_e
    scales = b_args.scales + base * b_args.scale_e
    scale_row, scale_part = _rows(block * HEIGHT, rows_all - 1, form.parts, ROW_LAYOUT)
    state = (
        words + (row.to(gl.int64) * b_args.stride_n)[:, None] + word,
        part,
        scales + scale_row,
        scale_part,
        gl.cdiv(K, STEP),
    )
    LAST: gl.constexpr = STEPS if EVEN else STEPS - 1
    tiles = _load_steps(state, b_args, form, 0, DEPTH, LAST)
    begin_pdl(PDL and SECOND)
    x_tiles = _share(x + vector * stride_x, K, STEPS, form.parts)
    left: gl.constexpr = gl.DotOperandLayout(0, MMA_SYNC, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, MMA_SYNC, 2)
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, MMA_SYNC)
    for k in gl.static_range(STEPS):
        if k + DEPTH < STEPS:
            tiles += _load_steps(state, b_args, form, k + DEPTH, k + DEPTH + 1, LAST)
            _stay(N)
        words_of_step = quarters(tiles[k][0])
        for place in gl.static_range(2):
            half = x_tiles[k].slice(place * (STEP // 2), STEP // 2, 1).permute((1, 0)).load(right)
            numbers = numbers_of(words_of_step, tiles[k][1], place, left, form.dequantize, half.dtype)
            sums = mma_v2(numbers, half, sums)
    value = _row_sums(sums, form.parts)
    layout: gl.constexpr = value.type.layout
    row = gl.minimum(block * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout)), rows_all - 1)
    if b_args.others is not None:
        value *= gl.load(b_args.others + base * b_args.other_e + row)[:, None]
    up = value
    if epilogue.gated:
        value, up = deinterleave(value, True)
    own: gl.constexpr = value.type.layout
    columns = block * value.shape[0] + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, own))
    one = gl.arange(0, 1, layout=gl.SliceLayout(0, own))
    target = pair + one
    finish_tile(value, up, epilogue, result, N, expert, target, target, one == 0, block, columns, True, False)
