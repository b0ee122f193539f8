"""int8 weights that become 16-bit (or float32) numbers in registers, for a product with activations of that type.

    weights       int32 [E, rows, K / 4] of four codes, in the order of `moe_int8.layout.order_words`; a float32 scale
                  per output row
    activations   bfloat16, float16 or float32 [M, K], as they are

Every int8 is a bfloat16 and a float16 number, and a few instructions on a word make four of them: the code in the low
bits of a mantissa, minus what the bits around it are worth.  The bytes of a word whose 16-bit forms lie in one register
are 0 and 2, and 1 and 3, and a thread holds the numbers 2w and 2w + 1 of every 16 columns: the words' order makes these
meet, so that no number leaves its register.  Weights go from registers into the tensor cores, so the product is always
transposed (SWAP).  The channel's scale is applied to the finished sum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.gemm.weight_tile import weight_tile
from moe_core.jit.casts import INTERPRET
from moe_core.jit.wait import wait_for_mma

#: words whose numbers change places; `moe_int8.layout.WORDS`
WORDS = tl.constexpr(8)

# Bytes 0 and 2 ($0, $1), 1 and 3 ($2, $3) of $4.  A bfloat16 of exponent 7 counts ones in its 7 bits of mantissa:
# 128 + (low 7 bits), minus 128, or 256 where the sign is set, whose place is that of the exponent's lowest bit.
_BFLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 high, low, sign, ones, less, one;
        mov.b32 ones, 0x43004300;
        mov.b32 less, 0xc300c300;
        mov.b32 one, 0x3f803f80;
        shr.u32 high, $4, 8;
        lop3.b32 low, $4, 0x007f007f, ones, 0xea;
        lop3.b32 sign, $4, 0x00800080, less, 0xea;
        fma.rn.bf16x2 low, low, one, sign;
        mov.b32 {$0, $1}, low;
        lop3.b32 low, high, 0x007f007f, ones, 0xea;
        lop3.b32 sign, high, 0x00800080, less, 0xea;
        fma.rn.bf16x2 low, low, one, sign;
        mov.b32 {$2, $3}, low;
    }
    """
)
# As above: 1024 + (code + 128), minus 1152.
_FLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 high, low, one, less;
        mov.b32 one, 0x3c003c00;
        mov.b32 less, 0xe480e480;
        shr.u32 high, $4, 8;
        lop3.b32 low, $4, 0x00ff00ff, 0x64806480, 0x6a;
        fma.rn.f16x2 low, low, one, less;
        mov.b32 {$0, $1}, low;
        lop3.b32 low, high, 0x00ff00ff, 0x64806480, 0x6a;
        fma.rn.f16x2 low, low, one, less;
        mov.b32 {$2, $3}, low;
    }
    """
)


@triton.jit
def widen(words, dtype: tl.constexpr):
    """int32 [N, W] as numbers [N, 4 W] of `dtype`, exact, in the columns' order."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    if INTERPRET or dtype == tl.float32:
        w0 = (words << 24 >> 24).to(tl.float32).to(dtype)
        w1 = (words << 8 >> 24).to(tl.float32).to(dtype)
        w2 = (words << 16 >> 24).to(tl.float32).to(dtype)
        w3 = (words >> 24).to(tl.float32).to(dtype)
    elif dtype == tl.float16:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _FLOAT16, "=h,=h,=h,=h,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        tl.static_assert(dtype == tl.bfloat16, "activations are bfloat16, float16 or float32")
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _BFLOAT16, "=h,=h,=h,=h,r", [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    # [word, of its pair, first or second pair] to [unit, first or second pair, word, of its pair]
    numbers = tl.join(tl.join(w0, w1), tl.join(w2, w3)).reshape(N, W // WORDS, WORDS, 2, 2).permute(0, 1, 4, 2, 3)
    return numbers.reshape(N, 4 * W)


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
def load_words(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Tile [BLOCK_N, BLOCK_K / 4]; rows are padded to whole units."""
    words = tl.cdiv(K, 4 * WORDS) * WORDS
    return weight_tile(state[0], state[1], state[3], b_desc, k, words, BLOCK_K // 4, EVEN_N, EVEN_K), 0.0


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + b @ a.T"""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    if INTERPRET or a.dtype == tl.float32:
        # the interpreter multiplies bfloat16 as if it were integers
        return tl.dot(widen(b, tl.float32), tl.trans(a.to(tl.float32)), acc, input_precision="ieee")
    elif acc.shape[1] <= 32:
        # each step's product by itself: ptxas makes every `wgmma` wait for the one before where it cannot tell that
        # nobody else sets a running sum meanwhile (as `fma`: Triton would turn a sum into a running one)
        step = tl.dot(widen(b, a.dtype), tl.trans(a))
        return tl.fma(step, tl.full(acc.shape, 1.0, tl.float32), acc)
    else:
        return wait_for_mma(tl.dot(widen(b, a.dtype), tl.trans(a), acc))


@triton.jit
def finish(acc, a_state, b_state, SWAP: tl.constexpr):
    """acc * scale of the channel."""
    return acc * b_state[2][:, None]


@triton.jit
def widen_kernel(words, out, ROWS: tl.constexpr, W: tl.constexpr):
    """`widen` of int32 [ROWS, W]."""
    row = tl.arange(0, ROWS)[:, None]
    numbers = widen(tl.load(words + row * W + tl.arange(0, W)[None, :]), out.dtype.element_ty)
    tl.store(out + row * (4 * W) + tl.arange(0, 4 * W)[None, :], numbers)
