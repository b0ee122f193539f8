"""Dequantization of words of integers to 16-bit values in column order, and shared helpers.

`dtype` is bfloat16 or float16, whose values are produced in pairs by inline assembly, or float32. Values are exact. The
two values of a 16-bit pair in a register are those that a tensor-core thread holds next to each other, so that nothing
moves between registers or threads. `moe_core.kernels.gemm.fragments.fragment_order` lists their columns.

Integers are placed in the low bits of a mantissa. A bfloat16 of exponent 7 counts ones from 128 on, a float16 of
exponent 10 from 1024 on. One `fma` subtracts the contribution of the bits around the code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.device.registers import join_last, unpack

# Operands of the assembly below: $0, $1, ... are the values of the pairs, then comes the word. With zero points, a pair
# to add follows. Where values are scaled, a pair of factors comes last. -0.0 as addend keeps the sign of zeros.


@triton.constexpr_function
def _text(bits: int, scaled: bool, symmetric: bool, float16: bool) -> str:
    """Assembly in which codes p and p + 16 / bits of a word form pair p.

    A pair is 128 + code (float16: 1024 + code), minus the same constant. bfloat16 has 7 bits of mantissa. So bytes are
    128 + (low 7 bits), minus 256, or minus 128 if the highest bit is set. That gives byte - 128, to which 128 - zero
    point is added.
    """
    kind, ones, one = ("f16x2", "0x64006400", "0x3c003c00") if float16 else ("bf16x2", "0x43004300", "0x3f803f80")
    count, high_bits = 32 // bits, bits == 8 and not float16
    word, first, second = f"${count}", f"${count + 1}", f"${count + 2}"
    mask = "0x007f007f" if high_bits else "0x000f000f" if bits == 4 else "0x00ff00ff"
    lines = [f"mov.b32 one, {one};"]
    if symmetric and not high_bits:
        lines.append(f"mov.b32 q, {'0xc308c308' if not float16 else '0xe408e408' if bits == 4 else '0xe480e480'};")
    for number in range(count // 2):
        lines.append(f"shr.u32 w, {word}, {bits * number};")
        lines.append(f"lop3.b32 p, w, {mask}, {ones}, 0xea;")
        if high_bits:
            lines.append("lop3.b32 q, w, 0x00800080, 0xc300c300, 0xae;")
        if high_bits or symmetric:
            lines.append(f"fma.rn.{kind} p, p, one, q;")
        if not symmetric:
            lines.append(f"fma.rn.{kind} p, p, one, {first};")
        if scaled:
            lines.append(f"fma.rn.{kind} p, p, {first if symmetric else second}, zero;")
        lines.append(f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, p;")
    return "{ .reg .b32 w, p, q, one, zero; mov.b32 zero, 0x80008000; " + " ".join(lines) + " }"


def _unshifted(low: str, high: str, added: str, factor: str = "") -> tl.constexpr:
    """Assembly for 4-bit codes times `low`, plus `added`, times `factor`.

    Codes of bits 4 to 7 are multiplied by `high` instead. The word is $8. A bfloat16 whose sign and exponent are zero,
    except for the exponent's last bit, counts multiples of 2^-133. So codes in bits 0 to 7 of each half need no shift.
    """
    lines = ["mov.b32 w, $8;"]
    for first in (0, 4):
        for number, mask, power in ((first, "0x000f000f", low), (first + 2, "0x00f000f0", high)):
            lines.append(f"and.b32 p, w, {mask};")
            lines.append(f"fma.rn.bf16x2 p, p, {power}, {added};")
            if factor:
                lines.append(f"mul.rn.bf16x2 p, p, {factor};")
            lines.append(f"mov.b32 {{${number}, ${number + 1}}}, p;")
        if first == 0:
            lines.append("shr.u32 w, w, 8;")
    constants = "mov.b32 a, 0x7f007f00; mov.b32 b, 0x7d007d00; mov.b32 c, 0xbe00be00;"
    return tl.constexpr("{ .reg .b32 w, p, a, b, c; " + constants + " ".join(lines) + " }")


_UNSHIFTED = _unshifted("$9", "$10", "$11")
# a, b, c: 2^127, 2^123, -2^-3.
_UNSHIFTED_64THS = _unshifted("a", "b", "c")
_UNSHIFTED_ZEROS = _unshifted("a", "b", "$9", "$10")
# $0, $1, $2 from a float32 $3, rounded: the value itself, times 2^-4, and times -8 * 2^-133.
_FACTORS = tl.constexpr(
    "{ .reg .b32 c; cvt.rn.bf16x2.f32 $0, $3, $3; "
    "mov.b32 c, 0x3d803d80; mul.rn.bf16x2 $1, $0, c; mov.b32 c, 0x80088008; mul.rn.bf16x2 $2, $0, c; }"
)


@triton.jit
def pair(x, dtype: tl.constexpr):
    """Two copies of float32 `x`, rounded to `dtype`, in an int32.

    In the interpreter, and where values are float32, `x` itself.
    """
    if INTERPRET or dtype == tl.float32:
        return x
    else:
        KIND: tl.constexpr = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
        return tl.inline_asm_elementwise("cvt.rn." + KIND + ".f32 $0, $1, $1;", "=r,f", [x], tl.int32, True, 1)


@triton.jit
def zero_offset(zero, BITS: tl.constexpr, dtype: tl.constexpr):
    """Operand for float32 zero points up to 2^BITS, as the functions with zero points take it."""
    if INTERPRET or dtype == tl.float32:
        return zero
    elif dtype == tl.float16:
        return pair(-1024.0 - zero, dtype)
    elif BITS == 4:
        return pair(-128.0 - zero, dtype)
    else:
        return pair(128.0 - zero, dtype)


@triton.jit
def in_columns(values, U: tl.constexpr = 4):
    """[N, 8 W] or [N, 4 W] in column order, from the values of `asm_values`.

    Those are eight or four [N, W]. U words of each thread are consecutive.
    """
    N: tl.constexpr = values[0].shape[0]
    W: tl.constexpr = values[0].shape[1]
    S: tl.constexpr = len(values) // 4
    numbers = join_last(values[:4])
    if S == 2:
        numbers = tl.join(numbers, join_last(values[4:]))
    # Word index to column index: half j, pair i and step s of a word; units of 4 threads t x U words u: [unit, t,
    # u, j, i, s].
    numbers = numbers.reshape(N, W // (4 * U), 4, U, 2, 2, S).permute(0, 1, 3, 6, 4, 2, 5)
    return numbers.reshape(N, 4 * S * W)


@triton.jit
def _interpreted(words, zero, scale, BITS: tl.constexpr):
    """Values in float32, in few operations, because the interpreter is slow for each."""
    N: tl.constexpr = words.shape[0]
    W: tl.constexpr = words.shape[1]
    CODES: tl.constexpr = 32 // BITS
    numbers = (unpack(words, BITS).to(tl.float32) - zero) * scale
    # code 4i + 2s + j (8 bits: 2i + j) of a word: [unit, t, u, i, s, j] to [unit, u, s, j, t, i]
    numbers = numbers.reshape(N, W // 16, 4, 4, 2, CODES // 4, 2).permute(0, 1, 3, 5, 6, 2, 4)
    return numbers.reshape(N, CODES * W)


@triton.jit
def asm_values(ASM: tl.constexpr, COUNT: tl.constexpr, INPUTS: tl.constexpr, operands, dtype: tl.constexpr):
    """COUNT values [N, W] of `dtype`: outputs $0, $1, ... of the assembly.

    The first of the `operands` are words [N, W]. Of 4-bit codes, each pair p holds codes p and p + 4; of 8-bit codes, p
    and p + 2.
    """
    tl.static_assert(dtype == tl.float16 or dtype == tl.bfloat16, "numbers are bfloat16 or float16")
    OPERANDS: tl.constexpr = "=h," * COUNT + INPUTS
    return tl.inline_asm_elementwise(
        ASM,
        OPERANDS,
        operands,
        # Not a variable, because Triton would convert it to a tensor.
        dtype=[tl.float16] * COUNT if dtype == tl.float16 else [tl.bfloat16] * COUNT,
        is_pure=True,
        pack=1,
    )


@triton.jit
def integer_values(words, offset, scale, BITS: tl.constexpr, dtype: tl.constexpr):
    """The 32 / BITS values of `integers`, as `asm_values`; `dtype` has 16 bits."""
    asm: tl.constexpr = _text(BITS, scale is not None, offset is None, dtype == tl.float16)
    operands = (words,)
    if offset is not None:
        operands += (offset,)
    if scale is not None:
        operands += (scale,)
    return asm_values(asm, 32 // BITS, "r" + ",r" * (len(operands) - 1), operands, dtype)


@triton.jit
def unshifted_int4(words, factor):
    """(code - 8) * factor * 2^-133, as `asm_values`.

    `factor` float32 [N, 1], below 2^127, is rounded first.
    """
    low, high, eight = tl.inline_asm_elementwise(_FACTORS, "=&r,=r,=r,f", [factor], [tl.int32] * 3, True, 1)
    return asm_values(_UNSHIFTED, 8, "r,r,r,r", (words, low, high, eight), tl.bfloat16)


@triton.jit
def unshifted_zeros(words, zero, scale):
    """(code - zero) * scale, as `asm_values`.

    `zero` and `scale` float32 [N, 1], below 2^121, are rounded first.
    """
    offset = pair(zero * -0.015625, tl.bfloat16)
    factor = pair(scale * 64.0, tl.bfloat16)
    return asm_values(_UNSHIFTED_ZEROS, 8, "r,r,r", (words, offset, factor), tl.bfloat16)


@triton.jit
def int4_64ths(words):
    """(code - 8) / 64 in bfloat16, as `asm_values`."""
    return asm_values(_UNSHIFTED_64THS, 8, "r", (words,), tl.bfloat16)


@triton.jit
def integers(words, offset, scale, BITS: tl.constexpr, dtype: tl.constexpr):
    """Codes minus their zero points, times `scale`.

    - `offset` [N, W]: see `zero_offset`; None subtracts the middle code
    - `scale` [N, W]: a `pair` of `dtype`, by which values are rounded; float32 where values are; or None
    """
    if INTERPRET or dtype == tl.float32:
        middle = 8.0 if BITS == 4 else 128.0
        zero = middle if offset is None else offset[:, :, None]
        factor = 1.0 if scale is None else scale[:, :, None]
        return _interpreted(words, zero, factor, 4 if BITS == 4 else 8)
    else:
        return in_columns(integer_values(words, offset, scale, BITS, dtype))
