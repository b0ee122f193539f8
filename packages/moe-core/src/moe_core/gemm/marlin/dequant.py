"""Words of integers as 16-bit numbers, in the columns' order; what other element types share with them.

`dtype` is bfloat16 or float16, whose numbers are made in pairs by assembly, or float32.  Numbers are exact.  The two
numbers of a 16-bit pair in a register are those that a thread of the tensor cores holds side by side, so that nothing
moves between registers or threads; `moe_core.gemm.marlin.words` says which columns they are.

Integers are made in the low bits of a mantissa: a bfloat16 of exponent 7 counts ones from 128 on, a float16 of exponent
10 from 1024 on, and one `fma` subtracts what the bits around the code are worth.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import INTERPRET

BF16 = tl.bfloat16

# In the texts below $0, $1, ... are the pairs' numbers, then comes the word; with zero points a pair to be added, and
# last, where numbers are scaled, a pair of factors.  -0.0 as addend keeps the sign of zeros.


def _text(lines: list[str], bits: int) -> str:
    """Lines of asm with names for operands, as one block."""
    count = 32 // bits
    text = "{ .reg .b32 w, p, q, one, zero; mov.b32 zero, 0x80008000; " + " ".join(lines) + " }"
    for name, number in (("WORD", count), ("FIRST", count + 1), ("SECOND", count + 2)):
        text = text.replace(name, f"${number}")
    return text


def _nibbles(*, scaled: bool, symmetric: bool, float16: bool) -> str:
    """Nibbles p and p + 4 of a word as pair p: 128 + nibble (float16: 1024 + nibble), minus as much."""
    kind, ones, one = ("f16x2", "0x64006400", "0x3c003c00") if float16 else ("bf16x2", "0x43004300", "0x3f803f80")
    lines = [f"mov.b32 one, {one};"]
    less = "FIRST"
    if symmetric:
        less = "q"
        lines.append(f"mov.b32 q, {'0xe408e408' if float16 else '0xc308c308'};")
    for number in range(4):
        lines.append(f"shr.u32 w, WORD, {4 * number};")
        lines.append(f"lop3.b32 p, w, 0x000f000f, {ones}, 0xea;")
        lines.append(f"fma.rn.{kind} p, p, one, {less};")
        if scaled:
            lines.append(f"fma.rn.{kind} p, p, {'FIRST' if symmetric else 'SECOND'}, zero;")
        lines.append(f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, p;")
    return _text(lines, 4)


def _bytes(*, scaled: bool, symmetric: bool, float16: bool) -> str:
    """Bytes p and p + 2 of a word as pair p.

    float16: 1024 + byte, minus as much.  bfloat16 has 7 bits of mantissa: 128 + (low 7 bits), minus 256, or 128 where
    the highest bit is set, makes byte - 128, to which 128 - zero point is added.
    """
    kind, one = ("f16x2", "0x3c003c00") if float16 else ("bf16x2", "0x3f803f80")
    lines = [f"mov.b32 one, {one};"]
    for number in range(2):
        lines.append(f"shr.u32 w, WORD, {8 * number};")
        if float16:
            lines.append("lop3.b32 p, w, 0x00ff00ff, 0x64006400, 0xea;")
            less = "FIRST"
            if symmetric:
                less = "q"
                lines.append("mov.b32 q, 0xe480e480;")
            lines.append(f"fma.rn.{kind} p, p, one, {less};")
        else:
            lines.append("lop3.b32 p, w, 0x007f007f, 0x43004300, 0xea;")
            lines.append("lop3.b32 q, w, 0x00800080, 0xc300c300, 0xae;")
            lines.append(f"fma.rn.{kind} p, p, one, q;")
            if not symmetric:
                lines.append(f"fma.rn.{kind} p, p, one, FIRST;")
        if scaled:
            lines.append(f"fma.rn.{kind} p, p, {'FIRST' if symmetric else 'SECOND'}, zero;")
        lines.append(f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, p;")
    return _text(lines, 8)


# by 8 bits, scaled, with zero points, float16
_TEXTS = tl.constexpr(
    tuple(
        make(scaled=scaled, symmetric=symmetric, float16=float16)
        for make in (_nibbles, _bytes)
        for scaled in (False, True)
        for symmetric in (True, False)
        for float16 in (False, True)
    )
)


@triton.jit
def pair(x, dtype: tl.constexpr):
    """int32: float32 `x`, rounded to `dtype`, twice."""
    return (x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001


@triton.jit
def zero_offset(zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """What the functions with zero points get for float32 ones, which go up to 2^BITS."""
    if INTERPRET or dtype == tl.float32:
        return zero
    elif dtype == tl.float16:
        return pair(-1024.0 - zero, dtype)
    elif BITS == 4:
        return pair(-128.0 - zero, dtype)
    else:
        return pair(128.0 - zero, dtype)


@triton.jit
def nibble_columns(v0, v1, v2, v3, v4, v5, v6, v7):
    """[N, W] numbers of the eight nibbles (p and p + 4 of each pair) as [N, 8 W] in the columns' order."""
    N: tl.constexpr = v0.shape[0]
    W: tl.constexpr = v0.shape[1]
    # of a word: its pair i, half j, step s; units of 4 threads t x 4 words u
    first = tl.join(tl.join(v0, v1), tl.join(v2, v3))
    second = tl.join(tl.join(v4, v5), tl.join(v6, v7))
    numbers = tl.join(first, second).reshape(N, W // 16, 4, 4, 2, 2, 2)
    #                 unit, u, s, j, t, i
    return numbers.permute(0, 1, 3, 6, 5, 2, 4).reshape(N, 8 * W)


@triton.jit
def byte_columns(v0, v1, v2, v3):
    """[N, W] numbers of the four bytes (p and p + 2 of each pair) as [N, 4 W] in the columns' order."""
    N: tl.constexpr = v0.shape[0]
    W: tl.constexpr = v0.shape[1]
    # of a word: its pair i, half j; units of 4 threads t x 4 words s
    numbers = tl.join(tl.join(v0, v1), tl.join(v2, v3)).reshape(N, W // 16, 4, 4, 2, 2)
    #                 unit, s, j, t, i
    return numbers.permute(0, 1, 3, 5, 2, 4).reshape(N, 4 * W)


@triton.jit
def _interpreted(words, zero, scale, BITS: tl.constexpr):
    """In float32; few operations, since the interpreter takes its time for each."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    CODES: tl.constexpr = 32 // BITS
    codes = (words[:, :, None] >> (BITS * tl.arange(0, CODES))[None, None, :]) & ((1 << BITS) - 1)
    numbers = (codes.to(tl.float32) - zero) * scale
    if BITS == 4:
        # nibble 4i + 2s + j of word 4t + u: [unit, t, u, i, s, j] to [unit, u, s, j, t, i]
        numbers = numbers.reshape(N, W // 16, 4, 4, 2, 2, 2).permute(0, 1, 3, 5, 6, 2, 4)
    else:
        # byte 2i + j of word 4t + s: [unit, t, s, i, j] to [unit, s, j, t, i]
        numbers = numbers.reshape(N, W // 16, 4, 4, 2, 2).permute(0, 1, 3, 5, 2, 4)
    return numbers.reshape(N, CODES * W)


@triton.jit
def nibble_values(ASM: tl.constexpr, INPUTS: tl.constexpr, operands, dtype: tl.constexpr):
    """Eight times [N, W], four pairs: $0 to $7 of asm with the `operands`, the first of which are words [N, W]."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h,=h,=h,=h,=h," + INPUTS,
            operands,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h,=h,=h,=h,=h," + INPUTS,
            operands,
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=1,
        )


@triton.jit
def nibble_numbers(ASM: tl.constexpr, INPUTS: tl.constexpr, operands, dtype: tl.constexpr):
    """[N, 8 W] numbers of `nibble_values`."""
    v0, v1, v2, v3, v4, v5, v6, v7 = nibble_values(ASM, INPUTS, operands, dtype)
    return nibble_columns(v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def byte_values(ASM: tl.constexpr, INPUTS: tl.constexpr, operands, dtype: tl.constexpr):
    """Four times [N, W], two pairs: as `nibble_values`, of bytes."""
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h," + INPUTS,
            operands,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h," + INPUTS,
            operands,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )


@triton.jit
def int8_values(words, dtype: tl.constexpr):
    """8-bit codes minus 128, as `byte_values`; float32 in the interpreter."""
    if INTERPRET or dtype == tl.float32:
        return (
            ((words >> 0) & 255).to(tl.float32) - 128.0,
            ((words >> 16) & 255).to(tl.float32) - 128.0,
            ((words >> 8) & 255).to(tl.float32) - 128.0,
            ((words >> 24) & 255).to(tl.float32) - 128.0,
        )
    else:
        asm: tl.constexpr = _TEXTS[8 + (dtype == tl.float16)]  # Triton 3.6 takes no text from an expression
        return byte_values(asm, "r", (words,), dtype)


@triton.jit
def integers(words, offset, scale, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes less their zero points, or less the middle code where `offset` is None, times `scale` if there is one.

    - `offset` [N, W], see `zero_offset`
    - `scale` [N, W]: a `pair` of `dtype`, by which numbers are rounded; float32 where numbers are
    """
    if INTERPRET or dtype == tl.float32:
        middle = 8.0 if BITS == 4 else 128.0
        zero = middle if offset is None else offset[:, :, None]
        factor = 1.0 if scale is None else scale[:, :, None]
        return _interpreted(words, zero, factor, 4 if BITS == 4 else 8)
    else:
        SCALED: tl.constexpr = scale is not None
        ZEROS: tl.constexpr = offset is not None
        asm: tl.constexpr = _TEXTS[(BITS == 8) * 8 + SCALED * 4 + ZEROS * 2 + (dtype == tl.float16)]
        if SCALED and ZEROS:
            return _columns(asm, "r,r,r", (words, offset, scale), BITS, dtype)
        elif SCALED or ZEROS:
            return _columns(asm, "r,r", (words, scale if SCALED else offset), BITS, dtype)
        else:
            return _columns(asm, "r", (words,), BITS, dtype)


@triton.jit
def _columns(ASM: tl.constexpr, INPUTS: tl.constexpr, operands, BITS: tl.constexpr, dtype: tl.constexpr):
    """[N, 32 / BITS * W] numbers of `nibble_values` or `byte_values`."""
    if BITS == 4:
        return nibble_numbers(ASM, INPUTS, operands, dtype)
    else:
        v0, v1, v2, v3 = byte_values(ASM, INPUTS, operands, dtype)
        return byte_columns(v0, v1, v2, v3)
