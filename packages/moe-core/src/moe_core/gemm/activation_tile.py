"""How tiles of activations that are not quantised are loaded: bfloat16, float16 or float32 [rows, K]."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import downcast


@triton.jit
def open_activations(a_args, rows, expert):
    """a_args = (values, row stride, columns)."""
    values, stride, columns = a_args
    return values + rows * stride, columns


@triton.jit
def load_activations(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K]."""
    values, columns = state
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(values[:, None] + column[None, :], mask=(column < columns)[None, :], other=0.0), 0.0


@triton.jit
def open_indexed(a_args, rows, expert):
    """a_args = (values, row stride, columns, index [E, columns], stride, pre_scales [E, K] or None, stride)."""
    values, stride, columns, index, stride_index, pre_scales, stride_pre = a_args
    base = expert.to(tl.int64)
    if pre_scales is None:
        return values + rows * stride, columns, index + base * stride_index
    else:
        return values + rows * stride, columns, index + base * stride_index, pre_scales + base * stride_pre


@triton.jit
def load_indexed(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K] of the columns that `index` names (-1: zeros), times their pre_scales."""
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    source = tl.load(state[2] + column, mask=column < state[1], other=-1)
    some = source >= 0
    tile = tl.load(state[0][:, None] + source[None, :], mask=some[None, :], other=0.0)
    if len(state) == 4:
        factor = tl.load(state[3] + source, mask=some, other=0.0)
        tile = downcast(tile.to(tl.float32) * factor[None, :], tile.dtype)
    return tile, 0.0
