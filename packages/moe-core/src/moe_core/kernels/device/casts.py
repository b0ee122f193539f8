"""Round float32 to narrower types, identically on a GPU and in Triton's interpreter.

The interpreter (observed in 3.6 and 3.9) truncates float32 to bfloat16, loses the carry from mantissa to exponent when
it rounds to e4m3, and does not support the NaN of e4m3. In the interpreter only, values are therefore first rounded in
float32 to a value that the narrow type can represent, which makes its conversion exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))
NAN = tl.constexpr(tl.PropagateNan.ALL)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _keep_bits(x, DROPPED: tl.constexpr):
    """Round float32 to nearest even, dropping DROPPED mantissa bits.

    For normal numbers; NaN and infinity pass.
    """
    bits = x.to(tl.int32, bitcast=True)
    half: tl.constexpr = (1 << (DROPPED - 1)) - 1
    mask: tl.constexpr = -(1 << DROPPED)
    rounded = (bits + half + ((bits >> DROPPED) & 1)) & mask
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, rounded.to(tl.float32, bitcast=True))


@triton.jit
def _with_sign(x, y):
    """Copy the sign of y to x >= 0."""
    return (x.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, by):
    """Compute x / by, correctly rounded for normal results.

    This takes one division per element of ``by``, then two Newton steps. (Markstein: with r = RN(1 / b) and q = RN(a
    r), RN(q + r (a - q b)) = RN(a / b).)
    """
    inverse = tl.div_rn(1.0, by)
    quotient = x * inverse
    return tl.fma(tl.fma(-quotient, by, x), inverse, quotient)


@triton.jit
def divide_all(x, by):
    """Compute `divide` by a positive number, including overflow and an infinite divisor.

    An overflow gives infinity, an infinite `by` gives 0.
    """
    rough = x * tl.div_rn(1.0, by)
    quotient = tl.where(by < float("inf"), divide(x, by), rough)
    return tl.where(tl.abs(rough) < float("inf"), quotient, rough)


@triton.jit
def round_e4m3(x):
    """Round float32, |x| <= 448, to nearest even e4m3, without a conversion to e4m3."""
    # below 2^-6 e4m3 has steps of 2^-9: adding 1.5 * 2^14 rounds to these, but loses the sign of zeros
    small = (tl.abs(x) + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, _with_sign(small, x), _keep_bits(x, 20))


@triton.jit
def round_e2m1(x):
    """Round float32, |x| <= 6, to an e2m1 value, to nearest even."""
    # below 1 e2m1 has steps of 0.5: adding 1.5 * 2^22 rounds to these
    small = (tl.abs(x) + 6291456.0) - 6291456.0
    return tl.where(tl.abs(x) < 1.0, _with_sign(small, x), _keep_bits(x, 22))


@triton.jit
def downcast_e4m3(x):
    """Convert float32, |x| <= 448 or NaN, to e4m3 (round to nearest even)."""
    if INTERPRET:
        # the interpreter rounds a NaN's mantissa as if it were finite: the top three mantissa bits must be set already
        x = tl.where(x == x, round_e4m3(x), tl.full(x.shape, 0x7FF00000, tl.int32).to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def factor_e4m3(x):
    """Return e4m3 as an MMA operand: unchanged on a GPU.

    The interpreter's `tl.dot` reads its NaN as 480, so there the operand is float32.
    """
    if INTERPRET:
        nan = (x.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        return tl.where(nan, float("nan"), x.to(tl.float32))
    else:
        return x


@triton.jit
def round_int8(x):
    """Convert float32 to int8: nearest integer, ties to even, saturating.

    NaN becomes 0; the caller must report it separately.
    """
    x = tl.maximum(tl.minimum(tl.where(x == x, x, 0.0), 127.0), -128.0)
    # adding 1.5 * 2^23 puts the integer into the low bits of the mantissa, as two's complement
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def downcast(x, dtype: tl.constexpr):
    """Convert float32 to float32, bfloat16 or float16 (round to nearest even)."""
    if INTERPRET and dtype == tl.bfloat16:
        x = _keep_bits(x, 16)
    return x.to(dtype)


@triton.jit
def at_most(x, limit):
    """Return the minimum of x and limit; NaN propagates."""
    return tl.minimum(x, limit, propagate_nan=NAN)


@triton.jit
def clamp(x, limit):
    """Clamp x to -limit .. limit; NaN propagates."""
    return tl.maximum(at_most(x, limit), -limit, propagate_nan=NAN)


@triton.jit
def scale_product(a, b):
    """Multiply two scales, saturating instead of infinity.

    Weights of zero may have any scale, and 0 * inf is NaN.
    """
    return at_most(a * b, FLOAT32_MAX)


@triton.jit
def rounded(x, codes):
    """Convert float32 to the type of `codes`.

    For e4m3, |x| <= 448 or NaN is required; int8 saturates, and NaN becomes 0.
    """
    dtype: tl.constexpr = codes.dtype.element_ty
    if dtype == tl.int8:
        return round_int8(x)
    elif dtype == tl.float8e4nv:
        return downcast_e4m3(x)
    else:
        return downcast(round_e4m3(x), dtype)


@triton.jit
def saturate(x, codes):
    """Convert float32 to the type of `codes`, saturating; NaN propagates (int8: 0)."""
    dtype: tl.constexpr = codes.dtype.element_ty
    if dtype == tl.int8:
        return round_int8(x)
    elif INTERPRET or (dtype != tl.float8e4nv or not tl.target_info.cuda_capability_geq(8, 9)):
        return rounded(clamp(x, 448.0), codes)
    else:
        return x.to(dtype)  # NVIDIA's conversion saturates
