"""e4m3 with scales that do not change along k: what the layer of `moe_core.gemm.fused.scaled_mm` needs of an element
type.

The product of a step is summed in the tensor cores and added in float32, since Hopper's units keep fewer bits of a
running sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_core.gemm.fused.scaled_mm import ScaledMMFunctions
from moe_core.gemm.scaled_mm import largest, load_scaled_rows, open_unquantized_rows, scale_of, scale_of_parts
from moe_core.jit.casts import INTERPRET, divide, divide_all, factor_e4m3, narrow_e4m3
from moe_core.ops._quantize_kernels import encode

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def saturate(x):
    """float32 to e4m3: what is too large becomes 448, NaN stays."""
    if INTERPRET or not tl.target_info.cuda_capability_geq(8, 9):
        return encode(x, "e4m3", tl.float8e4nv)
    else:
        return x.to(tl.float8e4nv)  # NVIDIA's conversion saturates


@triton.jit
def open_unquantized(a_args, rows, expert):
    """`open_unquantized_rows`."""
    return open_unquantized_rows(a_args, rows, expert, E4M3_MAX)


@triton.jit
def load_and_quantize(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K], quantised in registers."""
    return saturate(load_scaled_rows(state, k, BLOCK_K, False)), 0.0


@triton.jit
def load_and_quantize_static(state, k, BLOCK_K: tl.constexpr):
    """As `load_and_quantize`, by static scales."""
    return saturate(load_scaled_rows(state, k, BLOCK_K, True)), 0.0


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + a @ b.T"""
    a, b = factor_e4m3(a), factor_e4m3(b)
    if SWAP_AB:
        return acc + tl.dot(b, tl.trans(a), out_dtype=tl.float32)
    else:
        return acc + tl.dot(a, tl.trans(b), out_dtype=tl.float32)


@triton.jit
def quantize_row(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile whose whole AXIS is a row: e4m3 values and one float32 scale, amax / 448."""
    scale = scale_of(largest(tile, AXIS), E4M3_MAX)
    return narrow_e4m3(divide(tile, tl.expand_dims(scale, AXIS))), scale


@triton.jit
def quantize_static(tile, quant_args, expert, AXIS: tl.constexpr):
    """A tile of one expert, by its own scale: quant_args = (scales [E] float32,)."""
    return saturate(divide_all(tile, tl.load(quant_args[0] + expert))), 0.0


@triton.jit
def quantize_static_rows(tile, quant_args, expert, AXIS: tl.constexpr):
    """As `quantize_static` for rows of several experts, `expert` [rows, 1]; their scales are kept."""
    scale = tl.load(quant_args[0] + expert)
    return saturate(divide_all(tile, scale)), tl.max(scale, axis=1)


@triton.jit
def quantize_by_amax(tile, quant_args, expert, AXIS: tl.constexpr):
    """By one scale for everything; quant_args as for `scale_of_parts`."""
    scale = scale_of_parts(quant_args, E4M3_MAX)
    return saturate(divide(tile, scale)), tl.zeros((tile.shape[1 - AXIS],), tl.float32) + scale


E4M3 = ScaledMMFunctions(
    dtype=torch.float8_e4m3fn,
    open_unquantized=open_unquantized,
    load_and_quantize=load_and_quantize,
    load_and_quantize_static=load_and_quantize_static,
    multiply=multiply,
    quantize_row=quantize_row,
    quantize_static=quantize_static,
    quantize_static_rows=quantize_static_rows,
    quantize_by_amax=quantize_by_amax,
)
