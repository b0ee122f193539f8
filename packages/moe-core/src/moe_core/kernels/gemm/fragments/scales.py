"""Conversion of canonical scales to the layout of fragment order.

`moe_core.kernels.gemm.fragments.operand` reads that layout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.kernels.gemm.fragments.fragment_order import interleave
from moe_core.spec.numerics import e8m0_to_float32

#: Last bits of a float32 scale, which hold a zero point instead.
ZERO_BITS = 9
#: Exponent of the highest power of `powers_of`.
_HIGHEST = 60
#: NaN of e8m0.
_NAN = 255


def order_scales(scale: Tensor, zero_point: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """Reorder scales by group, and combine them with zero points.

    Args:
        scale: [E, rows, groups] of any float dtype.
        zero_point: uint8 or int32 of the same shape, 0 to 256, or None.
        interleaved: Whether the rows are two halves, to be interleaved in blocks of 8
            (:func:`moe_core.kernels.gemm.fragments.fragment_order.interleave`).

    Returns:
        float32 [E, groups, rows]. With zero points int32: the bits of the float32 scale, rounded to 14 bits of
        mantissa, with the zero points in the last bits.
    """
    out = by_group(scale, interleaved).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if zero_point is None:
        return out
    bits, last = out.view(torch.int32), 1 << ZERO_BITS
    # Round to nearest; 16-bit types have zeros there.
    return bits.add_(last // 2).bitwise_and_(-last).bitwise_or_(by_group(zero_point, interleaved))


def pair_scales(scale: Tensor, *, interleaved: bool = False) -> Tensor:
    """Reorder 16-bit scales so that two groups' scales of a row share one word.

    Args:
        scale: [E, rows, groups] of 16 bits.
        interleaved: See :func:`order_scales`.

    Returns:
        [E, pairs, rows, 2]; the last half of an odd number of groups is 0.
    """
    groups = by_group(scale, interleaved)
    experts, count, rows = groups.shape
    pairs = scale.new_zeros(experts, -(-count // 2), rows, 2)
    for half in (0, 1):
        pairs[:, : (count + 1 - half) // 2, :, half].copy_(groups[:, half::2])
    return pairs


def by_group(values: Tensor, interleaved: bool) -> Tensor:
    """Reorder values by group; a view where possible.

    Args:
        values: [E, rows, groups].
        interleaved: See :func:`order_scales`.

    Returns:
        [E, groups, rows].
    """
    return (interleave(values) if interleaved else values).transpose(1, 2)


def relative_scales(scale: Tensor, *, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Split scales into relative scales and one unit per row.

    Args:
        scale: [E, rows, groups].
        power_of_two: Whether units are powers of two. No bit is lost then, and the largest scale of a row is in [0.5,
            1), or in [1, 2) from 2^127 on. Otherwise the unit is the row's largest scale, or 1 if that is 0 or not
            finite. A row's largest scale is then exact where kernels round scales to 16 bits.

    Returns:
        Relative scales [E, rows, groups] and units [E, rows].
    """
    largest = scale.abs().amax(dim=2)
    if power_of_two:
        _, exponent = torch.frexp(largest)
        # 2^128 would be infinite.
        unit = torch.exp2(exponent.clamp(max=127).float())
    else:
        unit = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return scale / unit[:, :, None], unit


def powers_of(scales: Tensor) -> Tensor:
    """Return a power of two per expert, more than half of its largest finite scale.

    Values are computed from a scale times 2^126 / power. A scale of 2^62 or more gives infinity or NaN. A higher power
    would lose bits of the expert's other scales, and its product with 2^7, which multiplies sums, would be infinite.

    Args:
        scales: Scales of all experts, first dimension E.

    Returns:
        float32 [E], 1 to 2^60.
    """
    finite = torch.where(scales.isfinite(), scales.abs(), 0.0)
    _, exponent = torch.frexp(finite.flatten(1).amax(dim=1).float())
    return torch.exp2((exponent - 1).clamp(0, _HIGHEST).float())


def relative_e8m0(scale: Tensor, counting: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Split e8m0 scales into relative bytes and one scale per row.

    A row's bytes are relative to its largest scale, whose byte becomes ``largest`` and whose value becomes the channel
    scale. Bytes saturate at 0, for scales of 2^-``largest`` times the row's largest and less. Code 255 makes its row
    NaN.

    Args:
        scale: uint8 [E, rows, groups], e8m0 bytes.
        counting: bool in the shape of ``scale``; groups of all zeros are False and do not determine the largest scale.
        largest: Byte of the largest scale of a row.

    Returns:
        int32 [E, rows, steps], and float32 channel scales [E, rows].
    """
    exponents = torch.where(counting | (scale == _NAN), scale, 0).short()
    top = exponents.amax(dim=2)
    relative = (largest + exponents - top[:, :, None]).clamp_min(0).to(torch.uint8)
    return F.pad(relative, (0, -relative.shape[2] % 4)).view(torch.int32), e8m0_to_float32(top)
