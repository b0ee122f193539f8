"""GEMV for few tokens, without tensor cores: rows of packed words times a vector.

A program takes BLOCK_N rows of one expert's words and iterates over their columns, BLOCK_W words at a time. A thread
has four consecutive words of several rows. The vector values that it multiplies them with are in registers and serve
all its rows. The kernel waits only for memory: no sorting, no tiles, no sums shared between programs.

`form`, a `GemvForm`, describes the words:

    dequantize(words, dtype)   returns a tuple for words [N, W]: values plus `middle` as bytes of int32 [N, W], for
                               `moe_core.kernels.gemm.fragments.integer_dot`; or, if `middle` is 0, for rows with one
                               scale the four values [N, W] of 8-bit codes, as `asm_values`, to multiply in float32
    bits                       of a code
    scales                     "row": float32, one per row, which multiplies the finished sum; "group": float32, one
                               per `group` columns (-1: all), or 16-bit ones in pairs; "zero": int32, as "group", with
                               zero points (`moe_core.kernels.gemm.fragments.operand`); "e8m0": int32, one per 128
                               columns of 4-bit codes, with a byte per 32 columns: 254 plus an exponent; 127 and less
                               stands for 0
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moe_core.kernels.device.pdl import begin_pdl, wait_at_first
from moe_core.kernels.device.prefetch import prefetch_l2
from moe_core.kernels.device.registers import both_halves, half_of, split_last, unpack, word_pointers
from moe_core.kernels.gemm.fragments.integer_dot import integer_dot
from moe_core.kernels.gemm.fragments.operand import scale_of, zero_of
from moe_core.kernels.gemm.tiles.finalize import store_zeros
from moe_core.kernels.gemm.tiles.schedule import locate_vector
from moe_core.kernels.gemm.tiles.tile_kernel import deinterleave, finish_tile


class GemvForm(NamedTuple):
    """Compile-time description of the words; see the module docstring.

    Attributes:
        dequantize: Device function that unpacks words.
        bits: Bits per code.
        middle: Offset of the values in the bytes that ``dequantize`` returns; 0 if it returns values.
        scales: "row", "group", "zero" or "e8m0".
        group: Columns per group; -1 for the whole row.
    """

    dequantize: Any
    bits: tl.constexpr
    middle: tl.constexpr
    scales: tl.constexpr
    group: tl.constexpr


@triton.jit
def _dot(words, x, k, K, form):
    """Sums [N, Q, 4] over each word's values times those of `x`, and over the latter alone.

    `words` [N, 4 * Q] start at word k of a row, `x` points to K values. Where four words share a scale, they are
    summed: [N, Q].
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    PAIRS: tl.constexpr = 16 // form.bits
    ADDED: tl.constexpr = form.group == -1 or form.group >= 32 * PAIRS
    dtype: tl.constexpr = x.dtype.element_ty
    column = k * PAIRS + tl.arange(0, W * PAIRS)
    pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + column, mask=column < K // 2, other=0)
    # unit, u, s and j, t to unit, t, u, s and j (8 bits: s, j): see `moe_core.kernels.gemm.fragments.fragment_order`
    pairs = pairs.reshape(W // 16, 4, PAIRS, 4).permute(0, 3, 1, 2)
    pairs = split_last(pairs.reshape(W, PAIRS))
    values = both_halves(pairs[0], dtype)
    for i in tl.static_range(1, PAIRS):
        values += both_halves(pairs[i], dtype)
    numbers = form.dequantize(words, dtype)
    if form.middle != 0:
        return integer_dot(numbers, values, form.middle, ADDED)
    else:
        total = numbers[0].to(tl.float32) * values[0][None, :]
        for i in tl.static_range(1, 4):
            value = tl.broadcast_to(values[i][None, :], total.shape)
            total = tl.fma(numbers[i].to(tl.float32), value, total)
        total = tl.sum(total.reshape(N, W // 4, 4), axis=2)
        return total, total


@triton.jit
def _in_steps(word, stride_k, form):
    """Offset of a word from the first word of its row."""
    WORDS: tl.constexpr = 4 * form.bits
    return word // WORDS * stride_k + word % WORDS


@triton.jit
def _groups(k, form, Q: tl.constexpr, PAIRED: tl.constexpr):
    """The groups of Q runs of four words from word k on, [1, Q], or of each word, [1, Q, 4].

    PAIRED: for groups smaller than a unit, the pairs of the unit, [1, Q, 1 or 2].
    """
    UNIT: tl.constexpr = 512 // form.bits
    GROUP: tl.constexpr = form.group
    quad = k // 4 + tl.arange(0, Q)
    if GROUP == -1:
        group = quad * 0
    elif form.scales == "e8m0":
        group = quad // 4
    elif GROUP >= UNIT:
        group = quad // (4 * (GROUP // UNIT))
    elif PAIRED:
        PAIRS: tl.constexpr = UNIT // GROUP // 2
        group = quad[:, None] // 4 * PAIRS + tl.arange(0, PAIRS)[None, :]
    else:
        # A unit of four quads has 2 or 4 groups.
        group = quad[:, None] // 4 * (UNIT // GROUP) + tl.arange(0, 4)[None, :] // (4 * GROUP // UNIT)
    return tl.expand_dims(group, 0)


@triton.jit
def _of_pairs(words, k, form, dtype: tl.constexpr):
    """float32 scales [N, Q], or [N, Q, 4], from the paired words of `_load` for word k."""
    if len(words.shape) == 2:
        return half_of(words, _groups(k, form, words.shape[1], True) % 2, dtype)
    else:
        N: tl.constexpr = words.shape[0]
        Q: tl.constexpr = words.shape[1]
        GROUPS: tl.constexpr = 2 * words.shape[2]
        low, high = both_halves(words, dtype)
        scales = tl.join(low, high).reshape(N, Q, GROUPS, 1)
        return tl.broadcast_to(scales, (N, Q, GROUPS, 4 // GROUPS)).reshape(N, Q, 4)


@triton.jit
def _load(b_args, words, scale, k, width, inside, form, BLOCK_W: tl.constexpr, EVEN: tl.constexpr):
    """BLOCK_W words of each row from word k on, and their scales.

    Scales are [N, Q], each of four words, or [N, Q, 4]. `words` and `scale` point to the first of each row. For paired
    scales their words are returned, so that nothing waits for them before `_scaled`.
    """
    PAIRED: tl.constexpr = b_args.scales.dtype.element_ty.primitive_bitwidth == 16
    column = k + tl.arange(0, BLOCK_W)
    pointers = words[:, None] + _in_steps(column, b_args.stride_k, form)[None, :]
    if EVEN:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(column < width)[None, :], other=0)
    if form.scales == "row":
        # One scale for all steps.
        return tile, inside
    else:
        group = _groups(k, form, BLOCK_W // 4, PAIRED)
        if PAIRED and len(group.shape) == 2:
            group = group // 2
        # Beyond the last group, x is zero.
        group = tl.minimum(group, b_args.groups - 1) * b_args.scale_g
        if len(group.shape) == 2:
            return tile, tl.load(scale[:, None] + group, mask=inside[:, None], other=0)
        else:
            return tile, tl.load(scale[:, None, None] + group, mask=inside[:, None, None], other=0)


@triton.jit
def _scaled(sums, x_sums, scales, k, form, dtype: tl.constexpr):
    """[N, Q] of the result of `_dot` times the scales that `_load` returns, four words summed.

    dtype: of the scales.
    """
    if form.scales == "zero":
        sums += (2.0 ** (form.bits - 1) - zero_of(scales)) * x_sums
    if form.scales == "e8m0":
        exponent = unpack(scales, 8) - 127
        sums *= (tl.maximum(exponent, 0) << 23).to(tl.float32, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        sums *= _of_pairs(scales, k, form, dtype)
    elif form.scales != "row":
        sums *= scale_of(scales)
    return sums if len(sums.shape) == 2 else tl.sum(sums, axis=2)


@triton.jit
def _row_sums(b_args, expert, x, rows, N, K, form, BLOCK_W: tl.constexpr, EVEN: tl.constexpr, WAIT: tl.constexpr):
    """[BLOCK_N, BLOCK_W / 4] whose sums along the last axis are the `rows` [BLOCK_N] times x.

    WAIT: the previous launch produces x. Meanwhile the first words are prefetched into L2.
    """
    base = expert.to(tl.int64)
    inside = rows < N
    width = tl.cdiv(K, 128) * (4 * form.bits)
    # Rows beyond the last repeat it.
    words = b_args.words + base * b_args.stride_e + tl.minimum(rows, N - 1).to(tl.int64) * b_args.stride_n
    dtype: tl.constexpr = b_args.scales.dtype.element_ty
    scales = word_pointers(b_args.scales) + (base * b_args.scale_e + rows)
    if WAIT:
        line = tl.minimum(32 * tl.arange(0, BLOCK_W // 32), width - 1)
        prefetch_l2(words[:, None] + _in_steps(line, b_args.stride_k, form)[None, :], 1)
        begin_pdl(WAIT)
    total = tl.zeros((rows.shape[0], BLOCK_W // 4), tl.float32)
    for k in range(0, width, BLOCK_W):
        tile, found = _load(b_args, words, scales, k, width, inside, form, BLOCK_W, EVEN)
        total += _scaled(*_dot(tile, x, k, K, form), found, k, form, dtype)
    if form.scales == "row":
        total *= tl.load(scales, mask=inside, other=0.0)[:, None]
    if b_args.others is not None:
        total *= tl.load(b_args.others + base * b_args.other_e + rows, mask=inside, other=0.0)[:, None]
    return total


@triton.jit
def gemv_kernel(
    result,
    x,
    stride_x,
    b_args,
    row_args,
    epilogue,
    N,
    K,
    form,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EVEN: tl.constexpr,
    SECOND: tl.constexpr,
    ALONG_M: tl.constexpr,
    FINALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = epilogue(w x[row]), N columns; one program per pair and BLOCK_N rows of w.

    row_args, SECOND and ALONG_M as in `locate_vector`, result and epilogue as in the tile kernel. If gated, rows are
    gate and up interleaved in blocks of 8. SECOND also means: the previous launch produces only x, and lets this one
    begin when all launches before it were done. FINALIZE: a token has one pair, and `result` is the layer's output.
    """
    begin_pdl(PDL and not SECOND)
    rows_all = tl.cdiv(N, 8) * 16 if epilogue.gated else N
    pair, row, block, expert = locate_vector(row_args, tl.cdiv(rows_all, BLOCK_N), SECOND, ALONG_M)
    if expert < 0:
        wait_at_first(PDL and SECOND)
        if FINALIZE:
            store_zeros(result, N, pair, block * BLOCK_N + tl.arange(0, BLOCK_N))
        return
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    value = _row_sums(b_args, expert, x + row * stride_x, rows, rows_all, K, form, BLOCK_W, EVEN, PDL and SECOND)
    value = tl.sum(value, axis=1)[:, None]
    up = value
    if epilogue.gated:
        value, up = deinterleave(value, True)
    columns = block * value.shape[0] + tl.arange(0, value.shape[0])
    one = tl.arange(0, 1)
    target = pair + one
    finish_tile(value, up, epilogue, result, N, expert, target, target, one == 0, block, columns, True, False)
