"""Scales of canonical integer weights in the layout of the family, with their zero points."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_core.gemm.marlin.words import interleave

#: the last bits of a float32 scale, in whose place a zero point stands
ZERO_BITS = 9


def order_scales(scale: Tensor, zero_point: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """``scale`` [E, rows, groups] of any float dtype as [E, groups, rows]: float32, with zero points int32.

    ``zero_point`` uint8 or int32 of the same shape, 0 to 256: int32 has the bits of the float32 scale, rounded to 14
    bits of mantissa, and zero points in the last ones.  ``interleaved``: the rows are two halves, interleaved in blocks
    of 8 (:func:`moe_core.gemm.marlin.words.interleave`).
    """

    def turned(values: Tensor) -> Tensor:
        return (interleave(values) if interleaved else values).transpose(1, 2)

    out = turned(scale).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if zero_point is None:
        return out
    bits, last = out.view(torch.int32), 1 << ZERO_BITS
    # rounded to the nearest; 16-bit types have zeros there
    return bits.add_(last // 2).bitwise_and_(-last).bitwise_or_(turned(zero_point))
