"""e2m1 weights as functions of `moe_core.kernels.gemm.marlin`: dequantized in registers.

A code shifted to a 16-bit float's sign, last exponent bits and first mantissa bit equals the number times 2^-126
(bfloat16) or 2^-14 (float16), subnormals included. One multiplication restores the value exactly and applies the scale.

    scales           int32 [E, steps of 128 columns, rows], the bytes of a step's four groups: 253 + exponent
    channel_scales   float32 [E, rows], powers of two that multiply the final sums (`MarlinMatrix.channel_scales`)

Scales are relative to the largest of their row, whose byte is 253, the exponent of a bfloat16 number 2^126 times as
large. bfloat16 represents every product exactly for scales down to 2^-132 of it. float16 is exact for scales down to
2^-23 of it; smaller ones have an error of at most 2^-25 times the largest scale.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from moe_core.api.experts import TileConfig
from moe_core.api.kernels import (
    INTERPRET,
    LOAD_WORDS,
    GemvFunctions,
    MarlinMatrix,
    WordFunctions,
    asm_values,
    exponent_pair,
    in_columns,
    multiply,
    open_groups,
    per_word,
    scale_acc_channels,
    specialize,
    step_e8m0,
)

from moe_mxfp4 import scales

# byte of a row's largest scale, as `convert_e2m1` writes it
LARGEST = tl.constexpr(scales.LARGEST)


@triton.constexpr_function
def _pairs(word: str) -> str:
    """Return PTX that extracts a word's four pairs p0 to p3 in bfloat16 position.

    The fourth pair consists of two parts. A shift replaces the rotation if no bits wrap around: ptxas turns it into a
    multiplication, which runs on another, idle unit.
    """
    return f"""
    .reg .b32 p0, p1, p2, p3, part, sign; mov.b32 sign, 0x80008000;
    and.b32 p0, {word}, 0x81c081c0;
    shl.b32 p1, {word}, 4;
    and.b32 p1, p1, 0x81c081c0;
    shf.l.wrap.b32 p2, {word}, {word}, 10;
    and.b32 p2, p2, 0x81c081c0;
    shf.l.wrap.b32 p3, {word}, {word}, 14;
    and.b32 p3, p3, 0x81808180;
    shl.b32 part, {word}, 6;
    lop3.b32 p3, part, 0x00400040, p3, 0xea;
"""


@triton.constexpr_function
def _widening(float16: bool) -> str:
    """Return PTX that writes the word $8 as four pairs, times the pair $9, to $0 to $7.

    The addend -0.0 preserves the sign of zeros.
    """
    lines = [_pairs("$8")]
    for number in range(4):
        if float16:
            lines += [
                f"shl.b32 part, p{number}, 3;",
                "and.b32 part, part, 0x0e000e00;",
                f"lop3.b32 p{number}, p{number}, sign, part, 0xea;",
            ]
        lines += [
            f"fma.rn.{'f16x2' if float16 else 'bf16x2'} p{number}, p{number}, $9, sign;",
            f"mov.b32 {{${2 * number}, ${2 * number + 1}}}, p{number};",
        ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def _integers() -> str:
    """Return PTX that writes twice the values of the word $2, plus 64, to $0 and $1.

    The mantissa of a bfloat16 number with exponent 7 counts ones.
    """
    lines = [_pairs("$2"), ".reg .b32 up, one; mov.b32 up, 0x7f007f00; mov.b32 one, 0x43404340;"]
    lines += [f"fma.rn.bf16x2 p{number}, p{number}, up, one;" for number in range(4)]
    lines += [f"prmt.b32 ${word}, p{word}, p{word + 2}, 0x6240;" for word in range(2)]
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _rotated(words, BITS: tl.constexpr):
    """Rotate to the left."""
    return (words << BITS) | ((words >> (32 - BITS)) & ((1 << BITS) - 1))


@triton.jit
def _interpreted(words, scale):
    """Dequantize in float32, like the inline assembly for bfloat16."""
    p0 = words & -2118090304
    p1 = _rotated(words, 4) & -2118090304
    p2 = _rotated(words, 10) & -2118090304
    p3 = (_rotated(words, 14) & -2122284672) | (_rotated(words, 6) & 0x00400040)
    factor = scale * 8.507059173023462e37
    values = ()
    for pair in (p0, p1, p2, p3):
        # the bfloat16 numbers in both halves
        low = (pair << 16).to(tl.float32, bitcast=True) * factor
        values = (*values, low, (pair & -65536).to(tl.float32, bitcast=True) * factor)
    return values


@triton.jit
def e2m1_bytes(words, dtype: tl.constexpr):
    """Return twice the values of words, plus 64, as `integer_dot` takes them."""
    if INTERPRET:
        v = _interpreted(words, 2.0)
        even = (v[0] + v[4] * 256 + v[1] * 65536).to(tl.int32) + (v[5].to(tl.int32) << 24)
        odd = (v[2] + v[6] * 256 + v[3] * 65536).to(tl.int32) + (v[7].to(tl.int32) << 24)
        return even + 0x40404040, odd + 0x40404040
    else:
        return tl.inline_asm_elementwise(_integers(), "=&r,=r,r", [words], [tl.int32, tl.int32], True, 1)


@triton.jit
def e2m1_values(words, dtype: tl.constexpr, scale):
    """Dequantize the eight values of words and scale them, as `asm_values` returns them.

    `scale` holds pairs of `dtype` (`step_e8m0`); exact in bfloat16.
    """
    if INTERPRET:
        return _interpreted(words, scale)
    else:
        asm: tl.constexpr = _widening(dtype == tl.float16)
        return asm_values(asm, 8, "r,r", (words, scale), dtype)


@triton.jit
def e2m1_scaled(words, scales, COLUMNS: tl.constexpr, dtype: tl.constexpr):
    """Dequantize `words` [N, W] with their int32 `scales` [N] to [N, COLUMNS]."""
    return in_columns(e2m1_values(words, dtype, per_word(step_e8m0(scales, LARGEST, dtype), words.shape[1], 1)))


@triton.jit
def quarter_e2m1(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """Apply `e2m1_values` to the words of a quarter step, for the warp-specialized kernel.

    `scales` is ([64] of the step's four).
    """
    scale = exponent_pair((scales[0] >> (8 * U)) & 0xFF, LARGEST, dtype)
    return e2m1_values(words, dtype, scale[:, None])


_MULTIPLY = specialize(multiply, dequantize=e2m1_scaled)


def e2m1_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """Return the device functions (open_b, load_b, multiply, scale_acc).

    Args:
        matrix: converted weights.
        config: tile configuration of the launch.
    """
    return open_groups, LOAD_WORDS[4, 0], _MULTIPLY, scale_acc_channels


def e2m1_words() -> WordFunctions:
    """Return the word functions for four-warp kernels; a step has one word of scales."""
    return WordFunctions(1, lambda: quarter_e2m1)


def e2m1_gemv() -> GemvFunctions:
    """Return the functions for a few tokens.

    Weight bytes are twice the values, so scale bytes of 253 plus exponent count as 254 plus exponent.
    """
    return GemvFunctions(e2m1_bytes, "e8m0", 64, e2m1_words())
