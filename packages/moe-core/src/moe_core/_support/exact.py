"""Bit-reproducible float32 functions: torch, any GPU and the Triton interpreter agree.

Library exponentials and sums differ in the last place between devices and with the order of summation, which is
enough to swap two experts whose scores nearly tie. These functions use only operations that IEEE 754 defines exactly
(+, -, *, /, sqrt, conversions; no fused multiply-add) in a fixed order, and integer sums. The Triton equivalents are
in :mod:`moe_core.kernels.ops._exact_kernels`: change both together.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Below this value exp returns 0: no intermediate value is subnormal, so flush-to-zero makes no difference.
EXP_CUTOFF = -86.0
#: 1.5 * 2**23: adding and subtracting it rounds to the nearest integer, ties to even, for |x| < 2**22.
ROUND_MAGIC = 12582912.0
LOG2_E = 1.4426950408889634
#: ln 2 in two parts; the first has 9 significant bits, so its product with a small integer is exact.
LN2_HIGH = 0.693359375
LN2_LOW = -2.1219444005469057e-4
#: Scale of the terms of a fixed-point sum: 40 fractional bits leave 23 bits for the number of terms.
FIXED_POINT = 1099511627776.0


def exp_nonpositive(x: Tensor) -> Tensor:
    """Compute exp(x) for float32 x <= 0, within 2 units in the last place; 0 below -86.

    The method is a Cody-Waite reduction x = n ln 2 + r, |r| <= 0.35, and the Taylor polynomial of degree 7 (remainder
    r^8 / 8! < 6e-9).

    Args:
        x: float32, any shape.

    Returns:
        float32 of the same shape.
    """
    bounded = x.clamp(min=EXP_CUTOFF)
    n = (bounded * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    r = (bounded - n * LN2_HIGH) - n * LN2_LOW
    p = r * (1.0 / 5040.0) + (1.0 / 720.0)
    p = p * r + (1.0 / 120.0)
    p = p * r + (1.0 / 24.0)
    p = p * r + (1.0 / 6.0)
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_CUTOFF, 0.0, p * power)


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) without overflow; 0 for -inf, 1 for inf.

    Args:
        x: float32, any shape.

    Returns:
        float32 of the same shape.
    """
    e = exp_nonpositive(-x.abs())
    return torch.where(x < 0, e, 1.0) / (e + 1.0)


def sqrt_softplus(x: Tensor) -> Tensor:
    """Compute sqrt(log(1 + exp(x))); 0 for -inf.

    Args:
        x: float32, any shape.

    Returns:
        float32 of the same shape.
    """
    e = exp_nonpositive(-x.abs())
    # log(1 + e) = 2 artanh(s) with s = e / (2 + e) <= 1/3: the first omitted term is s^16 / 17 < 2e-9.
    s = e / (e + 2.0)
    z = s * s
    p = z * (1.0 / 15.0) + (1.0 / 13.0)
    p = p * z + (1.0 / 11.0)
    p = p * z + (1.0 / 9.0)
    p = p * z + (1.0 / 7.0)
    p = p * z + (1.0 / 5.0)
    p = p * z + (1.0 / 3.0)
    p = p * z + 1.0
    log1p = (s + s) * p
    # torch's float32 sqrt on a CPU is not correctly rounded; the double sqrt, rounded to float32, is.
    return (torch.where(x > 0, x, 0.0) + log1p).double().sqrt().float()


def sum_unit_terms(x: Tensor) -> Tensor:
    """Sum each row in fixed point, so that the order of summation does not matter.

    Each term loses less than 2**-40.

    Args:
        x: [M, E] float32, values from 0 to 1.

    Returns:
        [M, 1] float32.
    """
    return (x * FIXED_POINT).long().sum(dim=1, keepdim=True).to(torch.float32) * (1.0 / FIXED_POINT)


def sum_pairwise(x: Tensor) -> Tensor:
    """Sum each row by a pairwise tree, padded with zeros to a power of two.

    Args:
        x: [M, k].

    Returns:
        [M, 1].
    """
    columns = x.shape[1]
    padded = 1 << max(columns - 1, 0).bit_length()
    x = torch.nn.functional.pad(x, (0, padded - columns))
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x


def ordered_int(x: Tensor) -> Tensor:
    """Map float32 to int32 with the same order; -0 and 0 are equal.

    Args:
        x: float32 without NaN.

    Returns:
        int32 of the same shape.
    """
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
