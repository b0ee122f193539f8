"""e4m3 weights that become 16-bit (or float32) numbers in registers, for a product with activations of that type.

    weights       e4m3 [E, rows, K], read as int32 words of four bytes; K is a multiple of 16
    activations   16-bit or float32 [M, K padded to whole steps], columns in the order of `arrange`

An e4m3 byte shifted into the place of a 16-bit number's exponent is that number times 2^-120 (bfloat16) or 2^-8
(float16), subnormals included; one multiplication makes it exact.  That needs no FP8 hardware, and takes fewer
instructions than the conversion to bfloat16 that sm_89 and newer have.  The two bytes of a word whose 16-bit forms lie
in one register are bytes 0 and 2, and 1 and 3; `arrange` orders the activations accordingly, once, where they are
written, so that no byte of the weights moves.  The product is always transposed (SWAP): weights go from registers into
the tensor cores.

Scales are applied where that is exact: per channel and per tensor to the finished sum, per block to the sum of each
step in float32, MXFP8's powers of two to the weights.  Those then have bfloat16's range, which float16 has not:
float16 activations meet them as sums of two bfloat16 numbers.  NaN codes (0x7f, 0xff) become 480: checkpoints are
checked for them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from moe_core.jit.casts import INTERPRET, narrow, narrow_e4m3
from moe_core.jit.wait import wait_for_mma
from moe_core.ops._quantize_kernels import magnitude_bits, scale_of

#: columns within which `arrange` moves
UNIT = tl.constexpr(32)
# columns that share a scale of MXFP8
MX_GROUP = tl.constexpr(32)

# $0, $1: bytes 0 and 2, $2, $3: bytes 1 and 3 of $4; -0.0 as addend keeps the sign of zeros
_BFLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 low, high, up, sign;
        mov.b32 sign, 0x80008000;
        mov.b32 up, 0x7b807b80;
        shl.b32 low, $4, 4;
        and.b32 low, low, 0x07f007f0;
        shl.b32 high, $4, 8;
        lop3.b32 low, high, sign, low, 0xea;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x07f007f0;
        lop3.b32 high, $4, sign, high, 0xea;
        fma.rn.bf16x2 low, low, up, sign;
        fma.rn.bf16x2 high, high, up, sign;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
    }
    """
)
# as above, times the pair of numbers $5
_BFLOAT16_SCALED = tl.constexpr(
    """
    {
        .reg .b32 low, high, up, sign;
        mov.b32 sign, 0x80008000;
        mov.b32 up, 0x7b807b80;
        shl.b32 low, $4, 4;
        and.b32 low, low, 0x07f007f0;
        shl.b32 high, $4, 8;
        lop3.b32 low, high, sign, low, 0xea;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x07f007f0;
        lop3.b32 high, $4, sign, high, 0xea;
        fma.rn.bf16x2 low, low, up, sign;
        fma.rn.bf16x2 high, high, up, sign;
        fma.rn.bf16x2 low, low, $5, sign;
        fma.rn.bf16x2 high, high, $5, sign;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
    }
    """
)
_FLOAT16 = tl.constexpr(
    """
    {
        .reg .b32 low, high, up, sign;
        mov.b32 sign, 0x80008000;
        mov.b32 up, 0x5c005c00;
        shl.b32 low, $4, 7;
        and.b32 low, low, 0x3f803f80;
        shl.b32 high, $4, 8;
        lop3.b32 low, high, sign, low, 0xea;
        shr.u32 high, $4, 1;
        and.b32 high, high, 0x3f803f80;
        lop3.b32 high, $4, sign, high, 0xea;
        fma.rn.f16x2 low, low, up, sign;
        fma.rn.f16x2 high, high, up, sign;
        mov.b32 {$0, $1}, low;
        mov.b32 {$2, $3}, high;
    }
    """
)


@triton.jit
def _product(acc, words, factor, x, SCALED: tl.constexpr):
    """acc [N, M] + (words [N, W] as numbers of x's dtype) @ x.T; SCALED: the numbers times `factor` [N, W].

    `x`: one tile [M, 4 W] in the order of `arrange`, or two [M, 2 W], the first halves of its units and the second.
    `factor`: float32, or for bfloat16 a pair of its numbers in int32 (the interpreter computes in float32).
    One function, because the interpreter takes a millisecond for each call of another.
    """
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    dtype: tl.constexpr = x[0].dtype
    tl.static_assert(not (SCALED and dtype == tl.float16), "float16 has too small a range for scaled weights")
    if INTERPRET or dtype == tl.float32:
        # the magnitude in the place of a float32's exponent is the number times 2^-120
        v0 = ((words << 24) & -0x80000000) | ((words & 0x7F) << 20)
        v1 = ((words << 8) & -0x80000000) | (((words >> 16) & 0x7F) << 20)
        v2 = ((words << 16) & -0x80000000) | (((words >> 8) & 0x7F) << 20)
        v3 = (words & -0x80000000) | (((words >> 24) & 0x7F) << 20)
        low = tl.join(v0, v1).to(tl.float32, bitcast=True) * 1.329227995784916e36
        high = tl.join(v2, v3).to(tl.float32, bitcast=True) * 1.329227995784916e36
        if SCALED:
            low, high = low * factor[:, :, None], high * factor[:, :, None]
    else:
        if dtype == tl.float16:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _FLOAT16, "=h,=h,=h,=h,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
            )  # fmt: skip
        elif SCALED:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _BFLOAT16_SCALED, "=h,=h,=h,=h,r,r", [words, factor],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            tl.static_assert(dtype == tl.bfloat16, "activations are bfloat16, float16 or float32")
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _BFLOAT16, "=h,=h,=h,=h,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=1,
            )  # fmt: skip
        low, high = tl.join(w0, w1), tl.join(w2, w3)
    if len(x) == 2:
        acc = tl.dot(low.reshape(N, 2 * W), tl.trans(x[0].to(low.dtype)), acc, input_precision="ieee")
        return tl.dot(high.reshape(N, 2 * W), tl.trans(x[1].to(low.dtype)), acc, input_precision="ieee")
    else:
        # [word, of its pair, low or high] to [unit, low or high, word, of its pair]: no number leaves its register
        numbers = tl.join(low, high).reshape(N, W // (UNIT // 4), UNIT // 4, 2, 2).permute(0, 1, 4, 2, 3)
        return tl.dot(numbers.reshape(N, 4 * W), tl.trans(x[0].to(low.dtype)), acc, input_precision="ieee")


@triton.jit
def arrange(tile, AXIS: tl.constexpr):
    """Order the columns (dimension AXIS) of a tile as the weights' registers hold them.

    Within each UNIT: columns 0, 2, 4, ... of the words' bytes 0 and 2 first, then 1, 3, 5, ... of bytes 1 and 3.
    """
    ROWS: tl.constexpr = tile.shape[1 - AXIS]
    UNITS: tl.constexpr = tile.shape[AXIS] // UNIT
    if AXIS == 1:
        return tile.reshape(ROWS, UNITS, UNIT // 2, 2).permute(0, 1, 3, 2).reshape(ROWS, UNITS * UNIT)
    else:
        return tile.reshape(UNITS, UNIT // 2, 2, ROWS).permute(0, 2, 1, 3).reshape(UNITS * UNIT, ROWS)


@triton.jit
def arrange_bfloat16(tile, Q, expert, AXIS: tl.constexpr):
    """`quantize` of the grouped matrix product for activations that stay bfloat16."""
    return arrange(narrow(tile, tl.bfloat16), AXIS), 0.0


@triton.jit
def arrange_float16(tile, Q, expert, AXIS: tl.constexpr):
    """As `arrange_bfloat16`, for float16."""
    return arrange(narrow(tile, tl.float16), AXIS), 0.0


@triton.jit
def arrange_float32(tile, Q, expert, AXIS: tl.constexpr):
    """As `arrange_bfloat16`, for float32."""
    return arrange(tile, AXIS), 0.0


@triton.jit
def arrange_halves(tile, Q, expert, AXIS: tl.constexpr):
    """float16 numbers as sums of two bfloat16 numbers, which hold any 11 bits: int32 of two neighbours' each.

    Within each UNIT: the higher halves in the order of `arrange`, then the lower halves.
    """
    rounded = narrow(tile, tl.float16).to(tl.float32)
    x = arrange(rounded if AXIS == 1 else tl.trans(rounded), 1)
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    high = narrow(x, tl.bfloat16).to(tl.float32)
    low = tl.where(tl.abs(high) == float("inf"), 0.0, x - high)
    pairs = tl.join(_pairs(high), _pairs(low)).reshape(ROWS, COLUMNS // UNIT, UNIT // 2, 2)
    pairs = pairs.permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)
    return pairs if AXIS == 1 else tl.trans(pairs), 0.0


@triton.jit
def _pairs(x):
    """int32 [ROWS, COLUMNS / 2]: neighbouring float32 numbers that are bfloat16 numbers, the first in the low bits."""
    first, second = x.to(tl.int32, bitcast=True).reshape(x.shape[0], x.shape[1] // 2, 2).split()
    return ((first >> 16) & 0xFFFF) | second


@triton.jit
def arrange_mxfp8(tile, Q, expert, AXIS: tl.constexpr):
    """Round to MXFP8 and back: e4m3 values times powers of two, which bfloat16 holds exactly."""
    ROWS: tl.constexpr = tile.shape[1 - AXIS]
    GROUPS: tl.constexpr = tile.shape[AXIS] // MX_GROUP
    if AXIS == 1:
        groups = tile.reshape(ROWS, GROUPS, MX_GROUP)
    else:
        groups = tile.reshape(GROUPS, MX_GROUP, ROWS)
    scale = scale_of(tl.max(magnitude_bits(groups), axis=2 if AXIS == 1 else 1, keep_dims=True), "e4m3", "e8m0")
    # the inverse of a power of two: 254 - exponent; that of NaN is as good as any, the scale comes back below
    inverse = (0x7F000000 - magnitude_bits(scale)).to(tl.float32, bitcast=True)
    codes = narrow_e4m3(groups * inverse)
    rounded = (codes.to(tl.float32) * scale).reshape(tile.shape)
    return arrange(rounded.to(tl.bfloat16), AXIS), 0.0


@triton.jit
def open_activations(A, rows, expert):
    """A = (values, row stride)."""
    values, stride = A
    return (values + rows * stride,)


@triton.jit
def load_activations(state, k, BLOCK_K: tl.constexpr):
    """One tile [BLOCK_M, BLOCK_K]."""
    (values,) = state
    return (tl.load(values[:, None] + (k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]),), 0.0


@triton.jit
def load_activations_apart(state, k, BLOCK_K: tl.constexpr):
    """The two tiles [BLOCK_M, BLOCK_K / 2] that meet bytes 0 and 2, and bytes 1 and 3."""
    (values,) = state
    column = tl.arange(0, BLOCK_K // 2)
    pointers = values[:, None] + (k * BLOCK_K + column // (UNIT // 2) * UNIT + column % (UNIT // 2))[None, :]
    return (tl.load(pointers), tl.load(pointers + UNIT // 2)), 0.0


@triton.jit
def load_halves(state, k, BLOCK_K: tl.constexpr):
    """Two tiles [BLOCK_M, BLOCK_K] of what `arrange_halves` wrote, as bfloat16: the higher halves and the lower."""
    (values,) = state
    column = tl.arange(0, BLOCK_K)
    pointers = values[:, None] + (2 * k * BLOCK_K + column // UNIT * (2 * UNIT) + column % UNIT)[None, :]
    return (tl.load(pointers), tl.load(pointers + UNIT)), 0.0


@triton.jit
def _open(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """(pointers to the rows' words, whether rows exist, first row among those of all experts).

    B = (words, scales, words' expert and row stride, scales' expert and row stride, block_n).
    """
    words, _, stride_e, stride_n, _, _, _ = B
    base = expert.to(tl.int64)
    columns = n + tl.arange(0, BLOCK_N)
    rows = words + base * stride_e + (half * N + columns).to(tl.int64) * stride_n
    return rows, columns < N, (base * (stride_e // stride_n)).to(tl.int32) + half * N + n


@triton.jit
def open_tensor(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Scales [E, 1 or 2]: one per matrix."""
    rows, inside, first = _open(B, expert, half, n, N, BLOCK_N)
    return rows, inside, B[1] + expert.to(tl.int64) * B[4] + half, first


@triton.jit
def open_channel(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Scales [E, rows]: one per row."""
    rows, inside, first = _open(B, expert, half, n, N, BLOCK_N)
    columns = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1)
    return rows, inside, B[1] + expert.to(tl.int64) * B[4] + (half * N + columns) * B[5], first


@triton.jit
def open_block(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Scales [E, blocks of rows, steps] of which a tile meets one per step; the up half has its own rows of blocks."""
    rows, inside, first = _open(B, expert, half, n, N, BLOCK_N)
    block_n = B[6]
    scale_row = n // block_n + half * tl.cdiv(N, block_n)
    return rows, inside, B[1] + expert.to(tl.int64) * B[4] + scale_row * B[5], first


@triton.jit
def open_block_mixed(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """As `open_block` for a tile that spans several rows of blocks: scales are vectors [BLOCK_N]."""
    rows, inside, first = _open(B, expert, half, n, N, BLOCK_N)
    block_n = B[6]
    scale_row = tl.minimum(n + tl.arange(0, BLOCK_N), N - 1) // block_n + half * tl.cdiv(N, block_n)
    return rows, inside, B[1] + expert.to(tl.int64) * B[4] + scale_row * B[5], first


@triton.jit
def open_mxfp8(B, expert, half: tl.constexpr, n, N, BLOCK_N: tl.constexpr):
    """Scales int32 [E, steps of 128, rows]: the four e8m0 bytes of each row and step; B[5] is the stride of a step.

    The up half starts at N rounded up to a multiple of 4.
    """
    rows, inside, first = _open(B, expert, half, n, N, BLOCK_N)
    columns = half * (tl.cdiv(N, 4) * 4) + n + tl.arange(0, BLOCK_N)
    return rows, inside, B[1] + expert.to(tl.int64) * B[4] + columns, first, B[5]


@triton.jit
def _load_words(rows, inside, first, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words [BLOCK_N, BLOCK_K / 4]; b_desc: a tensor descriptor over the words as [E * rows, K / 4], or None."""
    WORDS: tl.constexpr = BLOCK_K // 4
    if b_desc is None:
        depth = k * WORDS + tl.arange(0, WORDS)
        pointers = rows[:, None] + depth[None, :]
        if EVEN_N and EVEN_K:
            return tl.load(pointers)
        elif EVEN_K:
            return tl.load(pointers, mask=inside[:, None], other=0)
        else:
            return tl.load(pointers, mask=inside[:, None] & (depth < K // 4)[None, :], other=0)
    else:
        # rows beyond this half or this expert are other weights: they only reach columns that are never stored
        return b_desc.load([first, k * WORDS])


@triton.jit
def load_unscaled(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step, for scales that `finish` applies."""
    rows, inside, _, first = state
    return _load_words(rows, inside, first, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K), 0.0


@triton.jit
def load_block(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step and the float32 scale, a scalar or [BLOCK_N], of its block."""
    rows, inside, scales, first = state
    scale = tl.load(scales + k)
    return _load_words(rows, inside, first, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K), scale


@triton.jit
def load_mxfp8(state, b_desc, k, K, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """Words of a step and, for each row, the four scales of its four groups."""
    tl.static_assert(BLOCK_K == 4 * MX_GROUP, "an int32 holds the scales of one step")
    rows, inside, scales, first, stride = state
    if EVEN_N:
        scale = tl.load(scales + k * stride)
    else:
        scale = tl.load(scales + k * stride, mask=inside, other=0)
    return _load_words(rows, inside, first, b_desc, k, K, BLOCK_K, EVEN_N, EVEN_K), scale


@triton.jit
def multiply(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + b @ a.T, without scales."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return _add(acc, b, 0, a, False)


@triton.jit
def _add(acc, words, factor, x, SCALED: tl.constexpr):
    """`_product` into the running sum: of few rows each step's by itself, see `_add_step`."""
    if acc.shape[1] <= 32:
        return _add_step(acc, words, factor, x, SCALED)
    else:
        return wait_for_mma(_product(acc, words, factor, x, SCALED))


@triton.jit
def _add_step(acc, words, factor, x, SCALED: tl.constexpr):
    """acc + `_product` of this step.

    ptxas makes every `wgmma` wait for the one before where it cannot tell that nobody else sets a running sum
    meanwhile; here there is none.  (As `fma`: Triton would turn a sum into a running one.)
    """
    step = _product(tl.zeros_like(acc), words, factor, x, SCALED)
    return tl.fma(step, tl.full(acc.shape, 1.0, tl.float32), acc)


@triton.jit
def multiply_block(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (b @ a.T) * scale, a scalar."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return acc + _product(tl.zeros_like(acc), b, 0, a, False) * b_scale


@triton.jit
def multiply_block_mixed(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (b @ a.T) * scale, [BLOCK_N]."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return acc + _product(tl.zeros_like(acc), b, 0, a, False) * b_scale[:, None]


@triton.jit
def _power(exponent, MANTISSA: tl.constexpr):
    """Bits of 2^(exponent - 127) for a type with float32's exponent: 0 is subnormal, 255, e8m0's NaN, infinity."""
    return tl.maximum(exponent << MANTISSA, 1 << (MANTISSA - 1))


@triton.jit
def _factor(words, b_scale, dtype: tl.constexpr):
    """Scales of `words` [N, W] as `_product` takes them; b_scale int32 [N]: e8m0 bytes of the step's four groups."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    # The byte of each word, joined and reshaped rather than shifted by an index: what is computed from loads and
    # constants alone takes the layout of the tensor cores' operand, so that the weights go there without a detour
    # through shared memory.
    even = tl.join(b_scale & 0xFF, (b_scale >> 16) & 0xFF)
    odd = tl.join((b_scale >> 8) & 0xFF, (b_scale >> 24) & 0xFF)
    groups = tl.join(even, odd).reshape(N, 4)
    exponent = tl.broadcast_to(groups[:, :, None], (N, 4, W // 4)).reshape(N, W)
    if INTERPRET or dtype == tl.float32:
        return _power(exponent, 23).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(dtype == tl.bfloat16, "scaled weights are bfloat16 or float32 numbers")
        return _power(exponent, 7) * 0x10001


@triton.jit
def multiply_mxfp8(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """acc + (b with its scales) @ a.T, for activations that are bfloat16 or float32."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return _add(acc, b, _factor(b, b_scale, a[0].dtype), a, True)


@triton.jit
def multiply_mxfp8_stepwise(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """As `multiply_mxfp8`, for tiles of `wgmma` with registers left for the product of a step."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    return _add_step(acc, b, _factor(b, b_scale, a[0].dtype), a, True)


@triton.jit
def multiply_mxfp8_halves(acc, a, a_scale, b, b_scale, SWAP: tl.constexpr):
    """As `multiply_mxfp8`, for activations that are sums of two bfloat16 numbers."""
    tl.static_assert(SWAP, "weights come from registers: the product is transposed")
    high, low = a
    factor = _factor(b, b_scale, tl.bfloat16)
    return wait_for_mma(_product(_product(acc, b, factor, (low,), True), b, factor, (high,), True))


@triton.jit
def finish_tensor(acc, a_state, b_state, SWAP: tl.constexpr):
    """acc times the scale of the matrix."""
    return acc * tl.load(b_state[2])


@triton.jit
def finish_channel(acc, a_state, b_state, SWAP: tl.constexpr):
    """acc times the scales of its rows."""
    return acc * tl.load(b_state[2])[:, None]
