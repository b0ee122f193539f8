"""GEMV for one token, without tensor cores: rows of packed words times a vector, in float32.

A program takes BLOCK_N rows of one expert's words and goes through their columns, BLOCK_W words at a time.  A thread
has four consecutive words of several rows; the numbers of the vector that it multiplies them with are in registers,
each for all its rows.  There is nothing to wait for but memory: no sorting, no tiles, no sums that programs share.

`dequantize(words, dtype)` makes of words [N, W] a tuple of their eight (4 bits) or four numbers, each [N, W], in the
order of `moe_core.gemm.marlin.dequant.asm_values`; they are exact but for a scale, and 2 to the power of their PLACES
as large, which the vector's are made smaller by.  SCALES says what scales there are:

    "row"       float32, one per row: multiplies the finished sum
    "group"     float32, one per GROUP columns (-1: all)
    "zero"      int32, as "group", with zero points (`moe_core.gemm.marlin.operand`)
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.marlin.operand import scale_of, zero_of
from moe_core.jit.activation import activate_gated, activate_plain
from moe_core.jit.casts import downcast
from moe_core.ops._sort_kernels import local_expert


@triton.jit
def _wide(pairs, dtype: tl.constexpr):
    """float32 of the two `dtype` numbers in each int32."""
    if dtype == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(dtype == tl.float16, "activations are bfloat16 or float16")
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _dot(words, x, k, K, dequantize: tl.constexpr, BITS: tl.constexpr, PLACES: tl.constexpr):
    """[N, W] sums over each word's numbers times those of `x`, and the sums [W] of the latter.

    `words` [N, W] are those from word k of a row on, `x` points to K numbers.
    """
    W: tl.constexpr = words.shape[1]
    PAIRS: tl.constexpr = 16 // BITS
    dtype: tl.constexpr = x.dtype.element_ty
    column = k * PAIRS + tl.arange(0, W * PAIRS)
    pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + column, mask=column < K // 2, other=0)
    numbers = dequantize(words, dtype)
    # unit, u, s and j, t to unit, t, u, s and j (8 bits: s, j): see `moe_core.gemm.marlin.words`
    pairs = pairs.reshape(W // 16, 4, PAIRS, 4).permute(0, 3, 1, 2)
    if BITS == 4:
        even, odd = pairs.reshape(W, 2, 2).split()
        pair_0, pair_2 = even.split()
        pair_1, pair_3 = odd.split()
        values = _wide(pair_0, dtype) + _wide(pair_1, dtype) + _wide(pair_2, dtype) + _wide(pair_3, dtype)
    else:
        pair_0, pair_1 = pairs.reshape(W, 2).split()
        values = _wide(pair_0, dtype) + _wide(pair_1, dtype)
    x_sums = (values[0] + values[1]) + (values[2] + values[3])
    if BITS == 4:
        x_sums += (values[4] + values[5]) + (values[6] + values[7])
    total = numbers[0].to(tl.float32) * (values[0] * 2.0 ** -PLACES[0])[None, :]
    for i in tl.static_range(1, len(numbers)):
        value = values[i] * 2.0 ** -PLACES[i]
        total = tl.fma(numbers[i].to(tl.float32), tl.broadcast_to(value[None, :], total.shape), total)
    return total, x_sums


@triton.jit
def _group(scale, group, stride, groups, inside):
    """Scales [N, Q] of the groups [Q] of rows; columns beyond the last group meet zeros."""
    place = scale[:, None] + tl.minimum(group, groups - 1)[None, :] * stride
    return tl.load(place, mask=inside[:, None], other=0)


@triton.jit
def _by_word(scale, quad, stride, groups, inside, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Scales [N, Q, 4] of the words of quads, which lie in different groups of GROUP columns."""
    N: tl.constexpr = scale.shape[0]
    Q: tl.constexpr = quad.shape[0]
    # groups of a unit, which four quads share
    PARTS: tl.constexpr = (512 // BITS) // GROUP
    first = quad // 4 * PARTS
    if PARTS == 2:
        both = tl.join(_group(scale, first, stride, groups, inside), _group(scale, first + 1, stride, groups, inside))
        return tl.broadcast_to(both[:, :, :, None], (N, Q, 2, 2)).reshape(N, Q, 4)
    else:
        tl.static_assert(PARTS == 4, "a unit has 1, 2 or 4 groups")
        even = tl.join(_group(scale, first, stride, groups, inside), _group(scale, first + 2, stride, groups, inside))
        odd = tl.join(
            _group(scale, first + 1, stride, groups, inside), _group(scale, first + 3, stride, groups, inside)
        )
        return tl.join(even, odd).reshape(N, Q, 4)


@triton.jit
def _scaled(
    sums,
    x_sums,
    scale,
    k,
    stride,
    groups,
    inside,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """[N, W / 4] of the `sums` [N, W] of words from word k on: times their scales, four words added up."""
    N: tl.constexpr = sums.shape[0]
    Q: tl.constexpr = sums.shape[1] // 4
    UNIT: tl.constexpr = 512 // BITS
    by_quad = sums.reshape(N, Q, 4)
    if SCALES == "row":
        return tl.sum(by_quad, axis=2)
    quad = k // 4 + tl.arange(0, Q)
    if GROUP == -1 or GROUP >= UNIT:
        group = quad * 0 if GROUP == -1 else quad // 4 * UNIT // GROUP
        found = _group(scale, group, stride, groups, inside)
        sums = tl.sum(by_quad, axis=2)
        if SCALES == "zero":
            x_quads = tl.sum(x_sums.reshape(Q, 4), axis=1)
            sums += (2.0 ** (BITS - 1) - zero_of(found)) * x_quads[None, :]
        return sums * scale_of(found)
    else:
        found = _by_word(scale, quad, stride, groups, inside, BITS, GROUP)
        if SCALES == "zero":
            by_quad += (2.0 ** (BITS - 1) - zero_of(found)) * x_sums.reshape(Q, 4)[None, :, :]
        return tl.sum(by_quad * scale_of(found), axis=2)


@triton.jit
def _row_sums(
    b_args,
    expert,
    x,
    rows,
    N,
    K,
    dequantize: tl.constexpr,
    BITS: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EVEN: tl.constexpr,
):
    """[BLOCK_N, BLOCK_W / 4] whose sums along the last axis are the `rows` [BLOCK_N] of one expert times x."""
    words, scales, channel_scales, stride_e, stride_n, scale_e, scale_g, channel_e, groups = b_args
    base = expert.to(tl.int64)
    inside = rows < N
    width = tl.cdiv(K, 128) * (4 * BITS)
    place = words + base * stride_e + rows.to(tl.int64) * stride_n
    scale = scales + base * scale_e + rows
    total = tl.zeros((rows.shape[0], BLOCK_W // 4), tl.float32)
    for k in range(0, width, BLOCK_W):
        column = k + tl.arange(0, BLOCK_W)
        pointers = place[:, None] + column[None, :]
        if EVEN:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=inside[:, None] & (column < width)[None, :], other=0)
        sums, x_sums = _dot(tile, x, k, K, dequantize, BITS, PLACES)
        total += _scaled(sums, x_sums, scale, k, scale_g, groups, inside, BITS, SCALES, GROUP)
    if SCALES == "row":
        total *= tl.load(scale, mask=inside, other=0.0)[:, None]
    if channel_scales is not None:
        total *= tl.load(channel_scales + base * channel_e + rows, mask=inside, other=0.0)[:, None]
    return total


@triton.jit
def gemv_kernel(
    out,
    x,
    b_args,
    ids,
    expert_map,
    weights,
    bias,
    N,
    K,
    num_ids,
    num_experts,
    stride_out,
    stride_x,
    stride_bias,
    pairs_per_row,
    alpha,
    beta,
    limit,
    dequantize: tl.constexpr,
    BITS: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MAP: tl.constexpr,
    ROUTER_WEIGHT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = act(w x[pair // pairs_per_row] + bias), N columns; programs by pair and BLOCK_N rows of w.

    GATED: rows are gate and up interleaved in blocks of 8.  ACTIVATION "" leaves the product as it is.  ROUTER_WEIGHT
    multiplies the router weight: 0 never, 1 before bias and activation, 2 at the end.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows_all = tl.cdiv(N, 8) * 16 if GATED else N
    blocks = tl.cdiv(rows_all, BLOCK_N)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    expert = local_expert(ids, expert_map, pair, pair >= 0, num_ids, num_experts, HAS_MAP)
    if expert < 0:
        return
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_row = x + pair // pairs_per_row * stride_x
    total = _row_sums(b_args, expert, x_row, rows, rows_all, K, dequantize, BITS, PLACES, SCALES, GROUP, BLOCK_W, EVEN)
    value = tl.sum(total, axis=1)
    if ROUTER_WEIGHT != 0:
        weight = tl.load(weights + pair)
    if ROUTER_WEIGHT == 1:
        value *= weight
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    columns = block * WIDTH + tl.arange(0, WIDTH)
    inside = columns < N
    bias_row = bias
    if HAS_BIAS:
        bias_row += expert.to(tl.int64) * stride_bias
    if GATED:
        gate, up = value.reshape(BLOCK_N // 16, 2, 8).permute(0, 2, 1).split()
        gate = gate.reshape(WIDTH)
        up = up.reshape(WIDTH)
        if HAS_BIAS:
            gate += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
            up += tl.load(bias_row + N + columns, mask=inside, other=0.0).to(tl.float32)
        value = activate_gated(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    else:
        if HAS_BIAS:
            value += tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION != "":
            value = activate_plain(value, limit, ACTIVATION, HAS_LIMIT)
    if ROUTER_WEIGHT == 2:
        value *= weight
    tl.store(out + pair * stride_out + columns, downcast(value, out.dtype.element_ty), mask=inside)
