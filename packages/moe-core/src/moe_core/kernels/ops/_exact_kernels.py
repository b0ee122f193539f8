"""Triton versions of :mod:`moe_core._support.exact`, with identical bits.

They use the same operations in the same order. Launch kernels that use these with ``enable_fp_fusion=False``: a fused
multiply-add would round once where the PyTorch version rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core._support import exact as _exact

_EXP_CUTOFF = tl.constexpr(_exact.EXP_CUTOFF)
_ROUND_MAGIC = tl.constexpr(_exact.ROUND_MAGIC)
_LOG2_E = tl.constexpr(_exact.LOG2_E)
_LN2_HIGH = tl.constexpr(_exact.LN2_HIGH)
_LN2_LOW = tl.constexpr(_exact.LN2_LOW)
_FIXED_POINT = tl.constexpr(_exact.FIXED_POINT)
_FIXED_POINT_STEP = tl.constexpr(1.0 / _exact.FIXED_POINT)


@triton.jit
def divide(x, y):
    """Compute x / y of float32, correctly rounded.

    Triton's `/` is an approximation on NVIDIA GPUs.
    """
    return tl.div_rn(x, y)


@triton.jit
def round_half_even(x):
    """Round a float32 |x| < 2**22 to the nearest integer, as float32."""
    return (x + _ROUND_MAGIC) - _ROUND_MAGIC


@triton.jit
def exp_nonpositive(x):
    """Compute exp(x) for x <= 0."""
    bounded = tl.where(x < _EXP_CUTOFF, _EXP_CUTOFF, x)
    n = round_half_even(bounded * _LOG2_E)
    r = (bounded - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * (1.0 / 5040.0) + (1.0 / 720.0)
    p = p * r + (1.0 / 120.0)
    p = p * r + (1.0 / 24.0)
    p = p * r + (1.0 / 6.0)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_CUTOFF, 0.0, p * power)


@triton.jit
def sigmoid(x):
    """Compute 1 / (1 + exp(-x))."""
    e = exp_nonpositive(-tl.abs(x))
    return divide(tl.where(x < 0, e, 1.0), e + 1.0)


@triton.jit
def sqrt_softplus(x):
    """Compute sqrt(log(1 + exp(x)))."""
    e = exp_nonpositive(-tl.abs(x))
    s = divide(e, e + 2.0)
    z = s * s
    p = z * (1.0 / 15.0) + (1.0 / 13.0)
    p = p * z + (1.0 / 11.0)
    p = p * z + (1.0 / 9.0)
    p = p * z + (1.0 / 7.0)
    p = p * z + (1.0 / 5.0)
    p = p * z + (1.0 / 3.0)
    p = p * z + 1.0
    log1p = (s + s) * p
    return tl.sqrt_rn(tl.where(x > 0, x, 0.0) + log1p)


@triton.jit
def sum_unit_terms(x):
    """Sum the rows of x [R, E], terms within 0..1, in fixed point: [R, 1]."""
    total = tl.sum((x * _FIXED_POINT).to(tl.int64), axis=1, keep_dims=True)
    return total.to(tl.float32) * _FIXED_POINT_STEP


@triton.jit
def sum_pairwise(x):
    """Sum the rows of x [R, 2**i] as a tree of neighbors: [R, 1]."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(6):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [rows, x.shape[1] // 2, 2]), axis=2)
    return x


@triton.jit
def ordered_int(x):
    """Map float32 x (no NaN) to int32 in the same order; -0 and 0 are equal.

    Applied to the bits, the mapping is its own inverse.
    """
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_float(key):
    """Invert `ordered_int`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
