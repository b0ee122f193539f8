"""4-bit codes as float32 numbers without a shift for each: three instructions for a product.

A code at bit b of a word, with the rest of it replaced by the exponent of 2^23, is the float32 number 2^23 + code 2^b;
less 2^23 + 8 * 2^b it is (code - 8) 2^b, exactly.  That works for b up to 19; one shift brings the others there.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from moe_core.jit.casts import INTERPRET

# the bits at which `int4_shifted` leaves codes, and by how many the word is shifted for that
PLACES = (0, 16, 4, 8, 8, 12, 12, 16)
_SHIFTS = tl.constexpr((0, 0, 0, 12, 0, 12, 0, 12))
_BITS = tl.constexpr(PLACES)


def _text() -> tl.constexpr:
    lines = [".reg .b32 high, bits, one; .reg .f32 number;", "shr.u32 high, $8, 12; mov.b32 one, 0x4b000000;"]
    for output, (shift, bit) in enumerate(zip(_SHIFTS.value, PLACES, strict=True)):
        less = struct.pack(">f", -float(2**23 + 8 * 2**bit)).hex()
        lines.append(f"lop3.b32 bits, {'high' if shift else '$8'}, {15 << bit:#x}, one, 0xea;")
        lines.append(f"mov.b32 number, bits; add.rn.f32 ${output}, number, 0f{less};")
    return tl.constexpr("{ " + " ".join(lines) + " }")


_TEXT = _text()


@triton.jit
def int4_shifted(words, dtype: tl.constexpr):
    """The eight codes of `words` [N, W] minus 8, in the order of `asm_values`, times 2 to the power of their PLACES."""
    if INTERPRET:
        numbers = ()
        for i in tl.static_range(8):
            code = ((words >> (_SHIFTS[i] + _BITS[i])) & 15) - 8
            numbers = (*numbers, code.to(tl.float32) * 2.0 ** _BITS[i])  # type: ignore[assignment]
        return numbers
    else:
        return tl.inline_asm_elementwise(
            _TEXT, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=[tl.float32] * 8, is_pure=True, pack=1
        )
