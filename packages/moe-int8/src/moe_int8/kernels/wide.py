"""int8 weights that become 16-bit (or float32) numbers in registers, for a product with activations of that type.

    weights       int8 [E, rows, K], one float32 scale per output row
    activations   bfloat16, float16 or float32 [M, K], as they are

Every int8 is a bfloat16 and a float16 number, and a few instructions on four of them at a time make it: the code in the
low bits of a mantissa, minus what the bits around it are worth.  Weights go from registers into the matrix units, so
the product is always transposed (SWAP).  The channel's scale is applied to the finished sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.gemm.narrow import INTERPRET

# Bytes of $2 to pairs $0 and $1.  A bfloat16 of exponent 7 counts ones in its 7 bits of mantissa: 128 + (low 7 bits),
# minus 128, or 256 where the sign bit is set, which is the sign bit in the place of the lowest bit of the exponent.
_BFLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 low, sign, first, second, one;
        mov.b32 one, 0x3f803f80;
        and.b32 low, $2, 0x7f7f7f7f;
        and.b32 sign, $2, 0x80808080;
        prmt.b32 first, low, 0x43434343, 0x4140;
        prmt.b32 second, sign, 0xc3c3c3c3, 0x4140;
        fma.rn.bf16x2 $0, first, one, second;
        prmt.b32 first, low, 0x43434343, 0x4342;
        prmt.b32 second, sign, 0xc3c3c3c3, 0x4342;
        fma.rn.bf16x2 $1, first, one, second;
    }
    """
)
# As above: 1024 + (code + 128), minus 1152.
_FLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 code, first, one, less;
        mov.b32 one, 0x3c003c00;
        mov.b32 less, 0xe480e480;
        xor.b32 code, $2, 0x80808080;
        prmt.b32 first, code, 0x64646464, 0x4140;
        fma.rn.f16x2 $0, first, one, less;
        prmt.b32 first, code, 0x64646464, 0x4342;
        fma.rn.f16x2 $1, first, one, less;
    }
    """
)


@triton.jit
def widen(codes, dtype: tl.constexpr):
    """int8 as numbers of `dtype`, exact."""
    if INTERPRET or dtype == tl.float32:
        return codes.to(tl.float32).to(dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(_FLOAT16, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        tl.static_assert(dtype == tl.bfloat16, "activations are bfloat16, float16 or float32")
        return tl.inline_asm_elementwise(_BFLOAT16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def open_activations(A, rows, expert):
    """A = (values, row stride, K)."""
    values, stride, columns = A
    return values + rows * stride, columns


@triton.jit
def load_activations(state, k, BLOCK_K: tl.constexpr):
    """Tile [BLOCK_M, BLOCK_K]."""
    values, columns = state
    column = k * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(values[:, None] + column[None, :], mask=(column < columns)[None, :], other=0.0), 0.0


@triton.jit
def load_padded(state, k, BLOCK_K: tl.constexpr):
    """As `load_activations`, of rows that are padded to whole steps."""
    values, _ = state
    return tl.load(values[:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]), 0.0


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + b @ a.T"""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    if INTERPRET or a.dtype == tl.float32:
        # the interpreter multiplies bfloat16 as if it were integers
        return tl.dot(b.to(tl.float32), tl.trans(a.to(tl.float32)), acc, input_precision="ieee")
    elif acc.shape[1] <= 64:
        # each step's product by itself: ptxas makes every `wgmma` wait for the one before where it cannot tell that
        # nobody else sets a running sum meanwhile (as `fma`: Triton would turn a sum into a running one)
        step = tl.dot(widen(b, a.dtype), tl.trans(a))
        return tl.fma(step, tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return tl.dot(widen(b, a.dtype), tl.trans(a), acc)


@triton.jit
def finish(acc, a_state, b_state, SWAP: tl.constexpr):
    """acc * scale of the channel."""
    return acc * b_state[2][:, None]


@triton.jit
def widen_kernel(codes, out, COLUMNS: tl.constexpr):
    """`widen` of int8 [COLUMNS]."""
    column = tl.arange(0, COLUMNS)
    tl.store(out + column, widen(tl.load(codes + column), out.dtype.element_ty))
