"""4-bit codes as float32 numbers without a shift for each: three instructions for a product.

A code at bit b of a word, with the rest of it replaced by the exponent of 2^23, is the float32 number 2^23 + code 2^b;
less 2^23 + 8 * 2^b it is (code - 8) 2^b, exactly.  That works for b up to 19; one shift brings the others there.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from moe_core.jit.casts import INTERPRET

# of $0 to $7, codes at bits 0, 16, 4, 20, 8, 24, 12, 28: whether the word is shifted by 12, and the bit then
_PLACES = ((False, 0), (False, 16), (False, 4), (True, 8), (False, 8), (True, 12), (False, 12), (True, 16))


def _text() -> tl.constexpr:
    lines = [".reg .b32 high, bits, one; .reg .f32 number;", "shr.u32 high, $8, 12; mov.b32 one, 0x4b000000;"]
    for output, (shifted, bit) in enumerate(_PLACES):
        less = struct.pack(">f", -float(2**23 + 8 * 2**bit)).hex()
        lines.append(f"lop3.b32 bits, {'high' if shifted else '$8'}, {15 << bit:#x}, one, 0xea;")
        lines.append(f"mov.b32 number, bits; add.rn.f32 ${output}, number, 0f{less};")
    return tl.constexpr("{ " + " ".join(lines) + " }")


_TEXT = _text()


@triton.jit
def _number(words, BIT: tl.constexpr):
    return (((words >> BIT) & 15) - 8).to(tl.float32) * 2.0**BIT


@triton.jit
def int4_placed(words, dtype: tl.constexpr):
    """The eight codes of `words` [N, W] minus 8, in the order of `nibble_values`, times 2 to the power of their bit."""
    if INTERPRET:
        high = words >> 12
        return (
            _number(words, 0),
            _number(words, 16),
            _number(words, 4),
            _number(high, 8),
            _number(words, 8),
            _number(high, 12),
            _number(words, 12),
            _number(high, 16),
        )
    else:
        return tl.inline_asm_elementwise(
            _TEXT,
            "=f,=f,=f,=f,=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
