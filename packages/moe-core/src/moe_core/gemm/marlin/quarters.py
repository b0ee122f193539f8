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
from moe_core.jit.specialize import specialize

# whether numbers are multiplied by their groups' scales; set by `specialize`
SCALED = tl.constexpr(False)


@triton.jit
def _integers(words, scales, U: tl.constexpr, dtype: tl.constexpr):
    """Codes minus zero points; SCALED: times the scale of their group, rounded, else that of the row scales sums."""
    found = scales[U * len(scales) // 4]
    offset = None
    factor = None
    if SCALED:
        factor = pair(scale_of(found), dtype)[:, None]
    if found.dtype == tl.int32:
        offset = zero_offset(zero_of(found), 4, dtype)[:, None]
    return integer_values(words, offset, factor, 4, dtype)


#: of 4-bit codes, by whether they are multiplied by scales
QUARTER_INTEGERS = {scaled: specialize(_integers, SCALED=scaled) for scaled in (False, True)}
