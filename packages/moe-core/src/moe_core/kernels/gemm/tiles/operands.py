"""Loading tiles of operands that have no scales.

Weights with one element per byte (or more): the shared parts of `open_b` and `load_b`. Activations: bfloat16, float16
or float32 [rows, K], or codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import downcast


@triton.jit
def weight_rows(weights, stride_e, stride_n, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """(pointers to the tile's rows, mask of existing rows, index of the first row).

    The index is that of a descriptor over all experts. weights [E, rows, K] with contiguous columns, or the first step
    of block-major ones; the up half starts at row N.
    """
    columns = n + tl.arange(0, BLOCK_N)
    base = expert.to(tl.int64)
    rows = weights + base * stride_e + (half * N + columns).to(tl.int64) * stride_n
    first = (base * (stride_e // stride_n)).to(tl.int32) + half * N + n
    return rows, columns < N, first


@triton.jit
def step_strides(stride_n, stride_k):
    """Strides for `weight_tile` of weights whose k-loop steps are ``stride_k`` elements apart.

    (stride_k, rows, columns): the last two lead from one step to the next in a matrix of rows of ``stride_n`` elements,
    as a descriptor addresses it. Row-major weights advance by (0, BLOCK_K), block-major ones by (rows of an expert, 0).
    """
    rows = stride_k // stride_n
    return stride_k, rows, stride_k - rows * stride_n


@triton.jit
def weight_tile(
    rows,
    inside,
    first,
    b_desc,
    k,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    strides=None,
):
    """Tile [BLOCK_N, BLOCK_K] of step k, of row-major weights; with `step_strides`, of others.

    b_desc: a descriptor over the weights as a matrix (`moe_core.kernels.gemm.tiles.launch.rows_of_experts`), or None to
    load by pointers. One of its rows may hold several rows of a block-major step (`lines_of_experts`).
    """
    if b_desc is None:
        column = tl.arange(0, BLOCK_K)
        depth = k * BLOCK_K + column
        if strides is None:
            pointers = rows[:, None] + depth[None, :]
        else:
            pointers = (rows + k * strides[0])[:, None] + column[None, :]
        if EVEN_N and EVEN_K:
            tile = tl.load(pointers)
        elif EVEN_K:
            tile = tl.load(pointers, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=inside[:, None] & (depth < K)[None, :], other=0.0)
    else:
        # Rows beyond this half or this expert are other weights. They only reach columns that are never stored.
        SHARED: tl.constexpr = b_desc.block_shape[1] // BLOCK_K
        if strides is None:
            tile = b_desc.load([first, k * BLOCK_K])
        elif SHARED == 1:
            tile = b_desc.load([first + k * strides[1], k * strides[2]])
        else:
            tile = b_desc.load([(first + k * strides[1]) // SHARED, 0]).reshape(rows.shape[0], BLOCK_K)
    return tile


@triton.jit
def load_values(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K] of rows padded to whole steps.

    `state` starts with pointers to the rows.
    """
    return tl.load(state[0][:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]), 0.0


@triton.jit
def open_plain(a_args, rows, expert):
    """a_args = (values, row stride[, columns[, index, stride, pre_scales, stride]]).

    Without `columns`, rows are padded to whole steps. index [E, columns] names the source columns (-1: zeros), which
    pre_scales [E, K] multiply if it is not None.
    """
    pointers = a_args[0] + rows * a_args[1]
    # Triton 3.6 cannot take the length of a tuple that contains None.
    rest = a_args[2:4]
    if len(rest) < 2:
        return (pointers,) + rest
    else:
        columns, index, stride_index, pre_scales, stride_pre = a_args[2:]
        base = expert.to(tl.int64)
        if pre_scales is None:
            return pointers, columns, index + base * stride_index
        else:
            return pointers, columns, index + base * stride_index, pre_scales + base * stride_pre


@triton.jit
def load_plain(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K]."""
    if len(state) == 1:
        return load_values(state, k, BLOCK_K)
    else:
        column = k * BLOCK_K + tl.arange(0, BLOCK_K)
        some = column < state[1]
        if len(state) > 2:
            column = tl.load(state[2] + column, mask=some, other=-1)
            some = column >= 0
        tile = tl.load(state[0][:, None] + column[None, :], mask=some[None, :], other=0.0)
        if len(state) == 4:
            factor = tl.load(state[3] + column, mask=some, other=0.0)
            tile = downcast(tile.to(tl.float32) * factor[None, :], tile.dtype)
        return tile, 0.0
