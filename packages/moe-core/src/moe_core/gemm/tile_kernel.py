"""The grouped matrix product: one program computes one tile of one expert.

    out[row, n] = epilogue( sum_k a[row, k] * b[expert(row), n, k] )

The kernel owns what every scheme shares: the order of tiles, the pipelined loop over k, the gate and up halves,
bias, activation, quantisation of the result and router weights.  A scheme passes four `@triton.jit` functions:

    load_a(A, rows, mask, k, BLOCK_M, BLOCK_K)                        -> tile [BLOCK_M, BLOCK_K], scale
    load_b(B, b_desc, expert, half, n, k, N, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
                                                                      -> tile [BLOCK_N, BLOCK_K], scale
    multiply(acc, a, a_scale, b, b_scale, SWAP)                       -> acc
    quantize(tile, AXIS)                                              -> values, scale      (epilogue)

`rows` are rows of the operand A, `k` counts blocks of BLOCK_K, `n` is the first column of the tile, `half` is 0 for
gate (or the only half) and 1 for up.  A scale is whatever `multiply` of the same scheme understands.

SWAP computes the transposed tile [BLOCK_N, BLOCK_M]: matrix units take at least 64 rows but as few as 8 columns,
so that few tokens go into the columns and the weights, which come in abundance, into the rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.epilogue import activate_gated, activate_plain
from moe_core.gemm.narrow import narrow


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
def _column(vector, SWAP: tl.constexpr):
    """A vector along the rows of the result, shaped to multiply the tile."""
    return vector[None, :] if SWAP else vector[:, None]


@triton.jit
def _row(vector, SWAP: tl.constexpr):
    """A vector along the columns of the result, shaped to multiply the tile."""
    return vector[:, None] if SWAP else vector[None, :]


@triton.jit
def grouped_tile_kernel(
    out,
    out_scale,
    A,
    B,
    b_desc,
    S,
    bias,
    weights,
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
    load_a: tl.constexpr,
    load_b: tl.constexpr,
    multiply: tl.constexpr,
    quantize: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT: tl.constexpr,
    A_BY_TOKEN: tl.constexpr,
    OUT_BY_PAIR: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile per program; programs beyond the last tile return at once.

    N is the number of columns of the result (of one half when GATED), ACTIVATION "" leaves the product as it is,
    WEIGHT multiplies the router weight: 0 never, 1 before bias and activation, 2 at the end.
    A_BY_TOKEN: row of A is the token of the pair, else the sorted position.  OUT_BY_PAIR: likewise for the result.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_of(S)
    pid = tl.program_id(0)
    if pid >= tiles * blocks_n:
        return
    tile, block_n = _tile_of(pid, tiles, blocks_n, GROUP_M)
    expert, position, pair, mask = locate(S, tile, BLOCK_M)
    rows = pair // top_k if A_BY_TOKEN else position
    n = block_n * BLOCK_N

    SHAPE_0: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    SHAPE_1: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    acc = tl.zeros((SHAPE_0, SHAPE_1), dtype=tl.float32)
    acc_up = tl.zeros((SHAPE_0, SHAPE_1), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        a, a_scale = load_a(A, rows, mask, k, BLOCK_M, BLOCK_K)
        b, b_scale = load_b(B, b_desc, expert, 0, n, k, N, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        if GATED:
            c, c_scale = load_b(B, b_desc, expert, 1, n, k, N, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
            acc = multiply(acc, a, a_scale, b, b_scale, SWAP)
            acc_up = multiply(acc_up, a, a_scale, c, c_scale, SWAP)
        else:
            acc = multiply(acc, a, a_scale, b, b_scale, SWAP)

    columns = n + tl.arange(0, BLOCK_N)
    inside = columns < N
    if WEIGHT != 0:
        weight = tl.load(weights + pair, mask=mask, other=0.0)
    if WEIGHT == 1:
        acc = acc * _column(weight, SWAP)
        if GATED:
            acc_up = acc_up * _column(weight, SWAP)
    if HAS_BIAS:
        bias_row = bias + expert.to(tl.int64) * stride_bias
        acc += _row(tl.load(bias_row + columns, mask=inside, other=0.0).to(tl.float32), SWAP)
        if GATED:
            acc_up += _row(tl.load(bias_row + N + columns, mask=inside, other=0.0).to(tl.float32), SWAP)
    if GATED:
        acc = activate_gated(acc, acc_up, alpha, beta, limit, ACTIVATION, HAS_LIMIT)
    elif ACTIVATION != "":
        acc = activate_plain(acc, limit, ACTIVATION, HAS_LIMIT)
    if WEIGHT == 2:
        acc = acc * _column(weight, SWAP)

    target = pair if OUT_BY_PAIR else position
    offsets = _column(target * stride_out, SWAP) + _row(columns, SWAP)
    if quantize is None:
        tl.store(out + offsets, narrow(acc, out.dtype.element_ty), mask=_column(mask, SWAP) & _row(inside, SWAP))
    else:
        # columns up to the end of the last group become zeros, so that the next product may read whole groups
        if not EVEN_N:
            acc = tl.where(_row(inside, SWAP), acc, 0.0)
        values, scale = quantize(acc, 0 if SWAP else 1)
        tl.store(out + offsets, values, mask=_column(mask, SWAP))
        tl.store(out_scale + target * stride_out_scale + block_n, scale, mask=mask)
