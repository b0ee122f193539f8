"""Words as 16-bit numbers for the warp-specialised kernel: a step's words by quarters, `dequantize` of an element type.

    dequantize(words, scales, U, dtype) -> the eight numbers [64, 4] of `words` [64, 4], as `dequant.asm_values`

`words` are word U of four threads, which has the columns 32 U .. 32 U + 31 of a step (`moe_core.gemm.marlin.words`);
`scales` are a tuple of [64], as many as groups of a step have scales of their own, or the one of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.gemm.marlin.dequant import integer_values, pair, zero_offset
from moe_core.gemm.marlin.operand import scale_of, zero_of


@triton.jit
def quarter_integers(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points; the row's scale multiplies finished sums."""
    found = scales[0]
    if found.dtype == tl.int32:
        return integer_values(words, zero_offset(zero_of(found), 4, dtype)[:, None], None, 4, dtype)
    else:
        return integer_values(words, None, None, 4, dtype)


@triton.jit
def quarter_scaled_integers(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points, times the scale of their group, rounded."""
    found = scales[U * len(scales) // 4]
    factor = pair(scale_of(found), dtype)[:, None]
    if found.dtype == tl.int32:
        return integer_values(words, zero_offset(zero_of(found), 4, dtype)[:, None], factor, 4, dtype)
    else:
        return integer_values(words, None, factor, 4, dtype)
