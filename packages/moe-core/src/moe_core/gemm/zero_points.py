"""int8 codes with zero points: values are (code - zero point) * scale.

Scale and zero point travel as one int64, so that whatever moves a scale moves both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.jit.casts import divide_all


@triton.jit
def with_zero(scale, zero):
    """A float32 scale in the low half of an int64, an int32 zero point in the high one."""
    return (zero.to(tl.int64) << 32) | (scale.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def scale_and_zero(both):
    """The inverse of `with_zero`."""
    return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32)


@triton.jit
def shifted(x, scale, zero):
    """Codes of round(x / scale) + zero, saturating; NaN becomes 0."""
    quotient = divide_all(x, scale)
    x = tl.maximum(tl.minimum(tl.where(quotient == quotient, quotient, 0.0), 512.0), -512.0)
    # rounding comes before the zero point is added, as integer hardware does it
    code = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero
    code = tl.maximum(tl.minimum(code, 127), -128)
    return tl.where(quotient == quotient, code, 0).to(tl.int8)
