"""The grouped GEMM: one program computes one tile of one expert.

    out[row, n] = epilogue( sum_k a[row, k] * b[expert(row), n, k] )

The kernel owns what every scheme shares: the order of tiles, the pipelined loop over k, the gate and up halves,
bias, activation, quantisation of the result and router weights.  A scheme passes `@triton.jit` functions:

    open_a(a_args, rows, expert)                                -> state of a row tile, made once
    load_a(state, k, BLOCK_K)                                   -> tile [BLOCK_M, BLOCK_K], scale
    open_b(b_args, expert, half, n, N, BLOCK_N)                 -> state of a weight tile, made once per half
    load_b(state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)        -> tile [BLOCK_N, BLOCK_K], scale
    prefetch_b(state, K)                                        prefetches the tile's first weights to L2; may be None
    multiply(acc, a, a_scale, b, b_scale, SWAP_AB)              -> acc
    scale_acc(acc, a_state, b_state, SWAP_AB)                   -> acc, once after the loop, where scales do not change
                                                                   along k; may be None
    quantize(tile, quant_args, expert, AXIS)                    -> values, scale of the result; None to store it as is

`rows` [BLOCK_M] int64 are rows of the operand A, `expert` is the tile's local expert, `k` counts blocks of BLOCK_K, `n`
is the first column of the tile, `half` is 0 for gate (or the only half) and 1 for up.  States are tuples.  A scale is
whatever `multiply` of the same scheme understands (0.0 where there is none).  `open_b` reads nothing but weights and
their scales: it runs before the kernel that made A has ended.  `open_a` may read anything.

`quantize` gets a float32 tile and the scheme's own arguments `quant_args` (None if there are none), for example a
pointer to a static scale per expert.  It returns the tile's values and what is to be stored as their scales, with AXIS,
the tile's columns, reduced to one scale or to GROUPS of them, next to each other: shape [rows] for GROUPS 1, otherwise
[rows, GROUPS] for AXIS 1 and [GROUPS, rows] for AXIS 0.  Without an `out_scale` (static scales) the second value is
ignored.  Rows of x are quantised by functions of the same form, there on tiles [groups, columns] with AXIS 1: by
`moe_core.ops.batch` with `expert` [groups, 1]; by `moe_core.gemm.scatter_quantize_kernel` so or, if no expert matters,
with 0; by `moe_core.ops.sort`, where rows are tokens, with the token's number [groups, 1] in its place.

A result that is stored as it is may leave its largest magnitude in `amax`, as the bits of a non-negative float32 in
int32 (NaN is above infinity): AMAX "row" takes one per row of the result, "tensor" one for all finite numbers.  The
caller has zeroed them in an earlier launch (`sort_pairs(zero=)`).  The next GEMM's `load_a` can then quantise while it
loads.  AMAX "nan" goes with a `quantize` whose values have no NaN: the rows that hold one get its bits, others nothing.

SWAP_AB computes the transposed tile [BLOCK_N, BLOCK_M], weights first: the MMA takes at least 64 rows but as few as 8
columns, so that few tokens waste nothing.

INTERLEAVED: gate and up rows of the weights alternate in blocks of 8, each half padded to whole blocks.  The MMA leaves
a row and the eighth after it in one thread, so that a tile has gate and up of the same columns in the same registers.
Otherwise a gated tile has two accumulators (DUAL), of which each reads its own half of the weights.

SPLIT_K programs share the k loop of one tile, where tiles alone are too few for all multiprocessors.  Each stores its
partial sums in float32 and by pair, [pair * SPLIT_K + k_part, columns]; the next launch adds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.activation import activate_gated, activate_plain
from moe_core.jit.casts import narrow
from moe_core.ops._quantize_kernels import finite_bits, magnitude_bits

# which row of an operand or of the result belongs to a row of the tile
POSITION = tl.constexpr(0)  # its place in the sorted order
TOKEN = tl.constexpr(1)
PAIR = tl.constexpr(2)


@triton.jit
def _tile_of(pid, tiles, blocks_n, GROUP_M: tl.constexpr):
    """(tile, column block) of a program: GROUP_M row tiles share the columns that run at the same time."""
    if GROUP_M == 1:
        return pid // blocks_n, pid % blocks_n
    else:
        group = pid // (GROUP_M * blocks_n)
        first = group * GROUP_M
        size = tl.minimum(tiles - first, GROUP_M)
        within = pid % (GROUP_M * blocks_n)
        return first + within % size, within // size


@triton.jit
def _column(vector, SWAP_AB: tl.constexpr):
    """A vector along the rows of the result, shaped to multiply the tile."""
    return vector[None, :] if SWAP_AB else vector[:, None]


@triton.jit
def _row(vector, SWAP_AB: tl.constexpr):
    """A vector along the columns of the result, shaped to multiply the tile."""
    return vector[:, None] if SWAP_AB else vector[None, :]


@triton.jit
def _bias(row, columns, inside, SWAP_AB: tl.constexpr):
    """Bias of the tile's columns, shaped to be added to the tile."""
    return _row(tl.load(row + columns, mask=inside, other=0.0).to(tl.float32), SWAP_AB)


@triton.jit
def lora_deltas(lora_args, pair, columns, mask, SWAP_AB: tl.constexpr):
    """LoRA deltas of a tile, float32; lora_args = (values [pairs, columns], row stride, ids [pairs], -1: none)."""
    values, stride, ids = lora_args
    some = tl.load(ids + pair) >= 0
    offsets = _column(pair * stride, SWAP_AB) + _row(columns, SWAP_AB)
    return tl.load(values + offsets, mask=mask & _column(some, SWAP_AB), other=0.0).to(tl.float32)


@triton.jit
def _deinterleave(acc, SWAP_AB: tl.constexpr):
    """Gate and up of an interleaved tile, in registers."""
    tl.static_assert(SWAP_AB, "interleaved weights are the rows of a transposed tile")
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    gate, up = acc.reshape(ROWS // 16, 2, 8, COLUMNS).permute(0, 2, 3, 1).split()
    return gate.reshape(ROWS // 2, COLUMNS), up.reshape(ROWS // 2, COLUMNS)


@triton.jit
def store_amax(amax, value, target, row_mask, value_mask, AXIS: tl.constexpr, AMAX: tl.constexpr):
    """Raise `amax` to the largest magnitude of float32 `value`: per row (AXIS: columns), or of all that is finite."""
    bits = tl.where(value_mask, magnitude_bits(value) if AMAX == "row" else finite_bits(value), 0)
    if AMAX == "row":
        tl.atomic_max(amax + target, tl.max(bits, axis=AXIS), mask=row_mask, sem="relaxed")
    else:
        tl.static_assert(AMAX == "tensor", "amax is per row or tensor")
        # flat: Triton 3.6 cannot lay out one reduction behind another for sm_100
        tl.atomic_max(amax, tl.max(bits), sem="relaxed")


@triton.jit
def mark_nan(marks, value, target, value_mask, AXIS: tl.constexpr):
    """Write a NaN's bits for the rows `target` of `value` that hold one.

    Each NaN writes them by itself: there are none, and looking through whole rows first would cost more.
    """
    pointers = marks + tl.expand_dims(target, AXIS) + tl.zeros(value.shape, tl.int32)
    tl.store(pointers, 0x7FC00000, mask=value_mask & (value != value))


@triton.jit
def _rows(position, pair, top_k, WHICH: tl.constexpr):
    if WHICH == POSITION:
        return position
    elif WHICH == TOKEN:
        return pair // top_k
    else:
        return pair


@triton.jit
def grouped_gemm_kernel(
    out,
    out_scale,
    amax,
    a_args,
    b_args,
    b_desc,
    schedule,
    quant_args,
    bias,
    lora_args,
    topk_weights,
    N,
    K,
    stride_out,
    stride_out_scale,
    stride_bias,
    top_k,
    alpha,
    beta,
    limit,
    tiles_of: tl.constexpr,
    locate: tl.constexpr,
    open_a: tl.constexpr,
    load_a: tl.constexpr,
    open_b: tl.constexpr,
    load_b: tl.constexpr,
    prefetch_b: tl.constexpr,
    multiply: tl.constexpr,
    scale_acc: tl.constexpr,
    quantize: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUTER_WEIGHT: tl.constexpr,
    A_ROWS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    AMAX: tl.constexpr,
    PAD: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    OVERLAP_PROLOGUE: tl.constexpr,
    ACC_TYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile per program; programs beyond the last tile return at once.

    - N columns of the result (of one half when GATED); ACTIVATION "": none
    - ROUTER_WEIGHT multiplies: 0 nothing, 1 the product before bias and activation, 2 the result
    - A_ROWS and OUT_ROWS: which row of A and of the result a row of the tile is: POSITION, TOKEN or PAIR
    - PAD: rows of the result have room for whole tiles; columns beyond N become zeros, so that the next GEMM may read
      whole tiles
    - OVERLAP_PROLOGUE, with PDL: schedule and weights may be read before the kernel before this one has ended
    - SPLIT_K > 1: gemm1 stores its halves side by side, [gate N | up N], without bias and activation
    - lora_args, see `lora_deltas`: deltas are added before the bias, in columns [gate N | up N]
    - ACC_TYPE of the accumulator; `scale_acc` makes float32 of any other
    """
    if PDL and not OVERLAP_PROLOGUE:
        tl.extra.cuda.gdc_wait()
    # rows of the weights that a tile may have: of one half, or of both, interleaved
    rows = tl.cdiv(N, 8) * 16 if INTERLEAVED else N
    blocks_n = tl.cdiv(rows, BLOCK_N)
    subtiles = tiles_of(schedule) * SUBTILES
    pid = tl.program_id(0)
    if pid >= subtiles * blocks_n * SPLIT_K:
        return
    k_part = pid % SPLIT_K
    subtile, block_n = _tile_of(pid // SPLIT_K, subtiles, blocks_n, GROUP_M)
    expert, position, pair, mask = locate(schedule, subtile, BLOCK_M, SUBTILES)
    if SUBTILES > 1 and tl.sum(mask.to(tl.int32), axis=0) == 0:
        return
    n = block_n * BLOCK_N

    SHAPE_0: tl.constexpr = BLOCK_N if SWAP_AB else BLOCK_M
    SHAPE_1: tl.constexpr = BLOCK_M if SWAP_AB else BLOCK_N
    acc = tl.zeros((SHAPE_0, SHAPE_1), dtype=ACC_TYPE)
    DUAL: tl.constexpr = GATED and not INTERLEAVED
    acc_up = tl.zeros((SHAPE_0, SHAPE_1), dtype=ACC_TYPE)
    b_state = open_b(b_args, expert, 0, n, rows, BLOCK_N)
    up_state = open_b(b_args, expert, 1 if DUAL else 0, n, rows, BLOCK_N)
    if PDL and OVERLAP_PROLOGUE:
        if prefetch_b is not None:
            prefetch_b(b_state, K)
        tl.extra.cuda.gdc_wait()
    a_state = open_a(a_args, _rows(position, pair, top_k, A_ROWS), expert)
    steps = tl.cdiv(K, BLOCK_K)
    for k in range(steps * k_part // SPLIT_K, steps * (k_part + 1) // SPLIT_K):
        a, a_scale = load_a(a_state, k, BLOCK_K)
        b, b_scale = load_b(b_state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)
        if DUAL:
            b_up, b_up_scale = load_b(up_state, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K)
            acc = multiply(acc, a, a_scale, b, b_scale, SWAP_AB)
            acc_up = multiply(acc_up, a, a_scale, b_up, b_up_scale, SWAP_AB)
        else:
            acc = multiply(acc, a, a_scale, b, b_scale, SWAP_AB)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = BLOCK_N // 2 if INTERLEAVED else BLOCK_N
    columns = block_n * WIDTH + tl.arange(0, WIDTH)
    inside = columns < N
    target = _rows(position, pair, top_k, OUT_ROWS)
    stored = _column(mask, SWAP_AB) & _row(inside, SWAP_AB)
    if scale_acc is not None:
        acc = scale_acc(acc, a_state, b_state, SWAP_AB)
        if DUAL:
            acc_up = scale_acc(acc_up, a_state, up_state, SWAP_AB)
    if INTERLEAVED:
        acc, acc_up = _deinterleave(acc, SWAP_AB)
    if lora_args is not None and (SPLIT_K == 1 or ACTIVATION == ""):
        delta = lora_deltas(lora_args, pair, columns, stored, SWAP_AB)
        if SPLIT_K > 1:
            delta = tl.where(k_part == 0, delta, 0.0)
        acc += delta
        if GATED:
            acc_up += lora_deltas(lora_args, pair, N + columns, stored, SWAP_AB)
    if ROUTER_WEIGHT != 0:
        weight = _column(tl.load(topk_weights + pair), SWAP_AB)
    if SPLIT_K > 1:
        if ROUTER_WEIGHT != 0:
            acc = acc * weight
            acc_up = acc_up * weight
        offsets = _column((target * SPLIT_K + k_part) * stride_out, SWAP_AB) + _row(columns, SWAP_AB)
        if HAS_BIAS and ACTIVATION == "":
            scale = tl.where(k_part == 0, 1.0, 0.0) * (weight if ROUTER_WEIGHT == 2 else 1.0)
            acc += _bias(bias + expert.to(tl.int64) * stride_bias, columns, inside, SWAP_AB) * scale
        tl.store(out + offsets, acc, mask=stored)
        if GATED:
            tl.store(out + offsets + N, acc_up, mask=stored)
    else:
        if ROUTER_WEIGHT == 1:
            acc = acc * weight
            acc_up = acc_up * weight
        if HAS_BIAS:
            bias_row = bias + expert.to(tl.int64) * stride_bias
            acc += _bias(bias_row, columns, inside, SWAP_AB)
            if GATED:
                acc_up += _bias(bias_row + N, columns, inside, SWAP_AB)
        if GATED:
            acc = activate_gated(acc, acc_up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
        elif ACTIVATION != "":
            acc = activate_plain(acc, limit, ACTIVATION, HAS_LIMIT)
        if ROUTER_WEIGHT == 2:
            acc = acc * weight
        offsets = _column(target * stride_out, SWAP_AB) + _row(columns, SWAP_AB)
        AXIS: tl.constexpr = 0 if SWAP_AB else 1
        if PAD:
            if not EVEN_N or INTERLEAVED:
                acc = tl.where(_row(inside, SWAP_AB), acc, 0.0)
            stored = _column(mask, SWAP_AB)
        if quantize is None:
            values = narrow(acc, out.dtype.element_ty)
            if AMAX != "":
                store_amax(amax, values.to(tl.float32), target, mask, stored, AXIS, AMAX)
            tl.store(out + offsets, values, mask=stored)
        else:
            if AMAX == "nan":
                mark_nan(amax, acc, target, stored, AXIS)
            values, scale = quantize(acc, quant_args, expert, AXIS)
            tl.store(out + offsets, values, mask=stored)
            if out_scale is not None:
                scales = target * stride_out_scale + block_n * GROUPS
                if GROUPS == 1:
                    tl.store(out_scale + scales, scale, mask=mask)
                else:
                    group = tl.arange(0, GROUPS)
                    pointers = out_scale + _column(scales, SWAP_AB) + _row(group, SWAP_AB)
                    tl.store(pointers, scale, mask=_column(mask, SWAP_AB))
