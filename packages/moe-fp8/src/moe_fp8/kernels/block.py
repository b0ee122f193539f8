"""Block FP8 as the grouped matrix product sees it: how a tile is loaded, scaled and quantised.

    weights       e4m3 [E, rows, K], one float32 scale per block_n x block_k
    activations   e4m3 [M, K padded to whole groups], one float32 scale per row and group of block_k columns

BLOCK_K of the kernel equals block_k, so that each step of its loop meets one scale per row and one per weight block:
the step's product is summed in the matrix units and added, scaled, in float32.

This file is the model for another scheme: write these functions and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.gemm.narrow import narrow_e4m3

E4M3_MAX = tl.constexpr(448.0)
# the smallest amax that a scale is made from: keeps the scale of an all-zero group normal and finite
AMAX_FLOOR = tl.constexpr(1e-10)


@triton.jit
def load_activations(A, rows, mask, k, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """A = (values, scales, values' row stride, scales' row stride); the values are padded to whole groups."""
    values, scales, stride, stride_scale = A
    # before the tile: nothing waits for the scale until the product is done
    scale = tl.load(scales + rows * stride_scale + k, mask=mask, other=0.0)
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = tl.load(values + rows[:, None] * stride + columns[None, :], mask=mask[:, None], other=0.0)
    return tile, scale


@triton.jit
def load_weights(
    B,
    b_desc,
    expert,
    half: tl.constexpr,
    n,
    k,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Tile [BLOCK_N, BLOCK_K] that lies within one row of scale blocks, and its scale (a scalar).

    B = (weights, scales, weights' expert and row stride, scales' expert and row stride, block_n); the last dimension
    of both is contiguous.  b_desc: a tensor descriptor over the weights as [E * rows, K], or None for pointers.
    The up half starts at row N of the weights and at row ceil(N / block_n) of the scales.
    """
    weights, scales, stride_e, stride_n, scale_e, scale_n, block_n = B
    base = expert.to(tl.int64)
    scale_row = n // block_n + half * tl.cdiv(N, block_n)
    scale = tl.load(scales + base * scale_e + scale_row * scale_n + k)
    if b_desc is None:
        columns = n + tl.arange(0, BLOCK_N)
        depth = k * BLOCK_K + tl.arange(0, BLOCK_K)
        pointers = weights + base * stride_e + (half * N + columns).to(tl.int64)[:, None] * stride_n + depth[None, :]
        if EVEN_N and EVEN_K:
            tile = tl.load(pointers)
        elif EVEN_K:
            tile = tl.load(pointers, mask=(columns < N)[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=(columns < N)[:, None] & (depth < K)[None, :], other=0.0)
    else:
        # rows beyond this half or this expert are other weights: finite or not, they only reach columns that are
        # never stored
        tile = b_desc.load([(expert * (stride_e // stride_n) + half * N + n).to(tl.int32), k * BLOCK_K])
    return tile, scale


@triton.jit
def load_weights_mixed(
    B,
    b_desc,
    expert,
    half: tl.constexpr,
    n,
    k,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """As `load_weights` for a tile that spans several rows of scale blocks: the scale is a vector [BLOCK_N]."""
    weights, scales, stride_e, stride_n, scale_e, scale_n, block_n = B
    tile, _ = load_weights(B, b_desc, expert, half, n, k, N, K, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    columns = n + tl.arange(0, BLOCK_N)
    scale_row = columns // block_n + half * tl.cdiv(N, block_n)
    scale = tl.load(scales + expert.to(tl.int64) * scale_e + scale_row * scale_n + k, mask=columns < N, other=0.0)
    return tile, scale


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (a @ b.T) * scales; a_scale [BLOCK_M], b_scale a scalar."""
    scale = a_scale * b_scale
    if SWAP:
        return acc + tl.dot(b, tl.trans(a), out_dtype=tl.float32) * scale[None, :]
    else:
        return acc + tl.dot(a, tl.trans(b), out_dtype=tl.float32) * scale[:, None]


@triton.jit
def multiply_mixed(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (a @ b.T) * scales; a_scale [BLOCK_M], b_scale [BLOCK_N]."""
    if SWAP:
        return acc + tl.dot(b, tl.trans(a), out_dtype=tl.float32) * a_scale[None, :] * b_scale[:, None]
    else:
        return acc + tl.dot(a, tl.trans(b), out_dtype=tl.float32) * a_scale[:, None] * b_scale[None, :]


@triton.jit
def quantize(tile, AXIS: tl.constexpr):
    """Quantise a float32 tile whose whole AXIS is one group: e4m3 values and one float32 scale, amax / 448."""
    amax = tl.maximum(tl.max(tl.abs(tile), axis=AXIS), AMAX_FLOOR)
    scale = tl.div_rn(amax, tl.full(amax.shape, E4M3_MAX, tl.float32))
    values = tl.div_rn(tile, tl.broadcast_to(tl.expand_dims(scale, AXIS), tile.shape))
    return narrow_e4m3(values), scale


@triton.jit
def products(
    B,
    expert,
    half: tl.constexpr,
    n,
    k,
    values,
    scale,
    N,
    K,
    ROWS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Products of ROWS weight rows with one quantised activation vector: [ROWS, G * GROUP] float32.

    `values` [G, GROUP] and `scale` [G] are the activations of columns k .. k + G * GROUP; ROWS divides block_n.
    """
    weights, scales, stride_e, stride_n, scale_e, scale_n, block_n = B
    base = expert.to(tl.int64)
    group = k // GROUP + tl.arange(0, G)
    scale_row = n // block_n + half * tl.cdiv(N, block_n)
    weight_scale = tl.load(scales + base * scale_e + scale_row * scale_n + group, mask=group * GROUP < K, other=0.0)
    columns = n + tl.arange(0, ROWS)
    depth = k + tl.arange(0, G * GROUP)
    tile = tl.load(
        weights + base * stride_e + (half * N + columns).to(tl.int64)[:, None] * stride_n + depth[None, :],
        mask=(columns < N)[:, None] & (depth < K)[None, :],
        other=0.0,
    )
    x = tl.reshape(values * (scale * weight_scale)[:, None], (G * GROUP,))
    return tile.to(tl.float32) * x[None, :]
