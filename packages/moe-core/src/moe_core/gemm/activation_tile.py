"""How tiles of activations without scales are loaded: bfloat16, float16 or float32 [rows, K]."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.scaled_mm import load_values
from moe_core.jit.casts import downcast


@triton.jit
def open_plain(a_args, rows, expert):
    """a_args = (values, row stride): rows are padded to whole steps; with (…, columns) they have so many.

    (…, columns, index [E, columns], stride, pre_scales [E, K] or None, stride): columns that `index` names (-1: zeros),
    times their pre_scales.
    """
    pointers = a_args[0] + rows * a_args[1]
    # Triton 3.6 counts no tuple that holds a None
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
