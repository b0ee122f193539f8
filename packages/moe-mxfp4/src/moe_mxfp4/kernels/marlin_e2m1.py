"""e2m1 weights as the functions of `moe_core.gemm.marlin`: spread words, widened in registers.

A code in the place of a 16-bit number's sign, last exponent bits and first mantissa bit is that number times 2^-126
(bfloat16) or 2^-14 (float16), subnormals included; one multiplication makes it exact and applies the scale.

    scales    int32 [E, steps of 128 columns, rows], the bytes of a step's four groups: 253 + exponent
    channel_scales   float32 [E, rows], powers of two that multiply finished sums (`MarlinMatrix.channel_scales`)

Scales are relative to the largest of their row: its byte is 253, the exponent of a bfloat16 number 2^126 times as
large.  float16 loses only what is 2^-23 of a row's largest group.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from moe_core.experts_api import TileConfig
from moe_core.kernel_api import (
    FEW,
    INTERPRET,
    MarlinMatrix,
    add_product,
    load_group_4,
    nibble_columns,
    nibble_numbers,
    open_groups,
    per_word,
    scale_acc_channels,
    step_powers,
)

from moe_mxfp4 import scales

# the byte of a row's largest scale, as `convert_e2m1` makes it
LARGEST = tl.constexpr(scales.LARGEST)


def _widening(*, float16: bool) -> tl.constexpr:
    """$0 to $7: the word $8 as four pairs, times the pair $9.  -0.0 as addend keeps the sign of zeros."""
    lines = [
        "and.b32 p0, $8, 0x81c081c0;",
        "shl.b32 p1, $8, 3;",
        "and.b32 p1, p1, 0x81c081c0;",
        "shl.b32 p2, $8, 6;",
        "and.b32 p2, p2, 0x81c081c0;",
        # the fourth, in three parts
        "shr.u32 p3, $8, 3;",
        "and.b32 p3, p3, 0x01800180;",
        "shr.u32 part, $8, 7;",
        "lop3.b32 p3, part, 0x00400040, p3, 0xea;",
        "shl.b32 part, $8, 1;",
        "lop3.b32 p3, part, sign, p3, 0xea;",
    ]
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
    registers = ".reg .b32 p0, p1, p2, p3, part, sign; mov.b32 sign, 0x80008000;"
    return tl.constexpr("{ " + registers + " " + " ".join(lines) + " }")


_BFLOAT16 = _widening(float16=False)
_FLOAT16 = _widening(float16=True)


@triton.jit
def _low(pairs):
    """float32 of the bfloat16 numbers in the lower halves of int32 words."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _interpreted(words, scale):
    """As the asm for bfloat16 does it, in float32."""
    factor = scale * 8.507059173023462e37
    p0 = words & -2118090304
    p1 = (words << 3) & -2118090304
    p2 = (words << 6) & -2118090304
    p3 = ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040) | ((words << 1) & -2147450880)
    return nibble_columns(
        _low(p0) * factor,
        _high(p0) * factor,
        _low(p1) * factor,
        _high(p1) * factor,
        _low(p2) * factor,
        _high(p2) * factor,
        _low(p3) * factor,
        _high(p3) * factor,
    )


@triton.jit
def e2m1_scaled(words, scale, dtype: tl.constexpr):
    """[N, 8 W] numbers of `words` [N, W] times `scale` [N, W], rounded; `scale` as `step_powers` makes it."""
    if INTERPRET:
        return _interpreted(words, scale)
    else:
        tl.static_assert(dtype == tl.float16 or dtype == tl.bfloat16, "activations are bfloat16 or float16")
        asm: tl.constexpr = _FLOAT16 if dtype == tl.float16 else _BFLOAT16
        return nibble_numbers(
            asm,
            "r,r",
            (
                words,
                scale,
            ),
            dtype,
        )


@triton.jit
def multiply_mxfp4(acc, a, a_scale, b, b_scale, SWAP_AB: tl.constexpr):
    """acc + (b with its scales) @ a.T, exact numbers of bfloat16."""
    tl.static_assert(SWAP_AB, "weights come from registers: SWAP_AB only")
    numbers = e2m1_scaled(b, per_word(step_powers(b_scale, LARGEST, a.dtype), b.shape[1], 1), a.dtype)
    return add_product(acc, numbers, a, acc.shape[1] <= FEW)


def e2m1_functions(matrix: MarlinMatrix, config: TileConfig) -> tuple[Any, Any, Any, Any]:
    """(open_b, load_b, multiply, scale_acc)."""
    return open_groups, load_group_4, multiply_mxfp4, scale_acc_channels
