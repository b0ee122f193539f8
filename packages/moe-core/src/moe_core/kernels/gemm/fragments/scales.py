"""Scales of canonical weights in the layout of the family; `moe_core.kernels.gemm.fragments.operand` reads them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.kernels.gemm.fragments.fragment_order import interleave
from moe_core.spec.numerics import e8m0_to_float32

#: the last bits of a float32 scale, in whose place a zero point stands
ZERO_BITS = 9
#: exponent of the highest power of `powers_of`
_HIGHEST = 60
#: e8m0's NaN
_NAN = 255


def order_scales(scale: Tensor, zero_point: Tensor | None = None, *, interleaved: bool = False) -> Tensor:
    """``scale`` [E, rows, groups] of any float dtype as [E, groups, rows]: float32, with zero points int32.

    ``zero_point`` uint8 or int32 of the same shape, 0 to 256: int32 has the bits of the float32 scale, rounded to 14
    bits of mantissa, and zero points in the last ones.  ``interleaved``: the rows are two halves, interleaved in blocks
    of 8 (:func:`moe_core.kernels.gemm.fragments.fragment_order.interleave`).
    """
    out = by_group(scale, interleaved).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    if zero_point is None:
        return out
    bits, last = out.view(torch.int32), 1 << ZERO_BITS
    # rounded to the nearest; 16-bit types have zeros there
    return bits.add_(last // 2).bitwise_and_(-last).bitwise_or_(by_group(zero_point, interleaved))


def pair_scales(scale: Tensor, *, interleaved: bool = False) -> Tensor:
    """``scale`` [E, rows, groups] of 16 bits as [E, pairs, rows, 2]: two groups' scales of a row in one word.

    The last half of an odd number of groups is 0.  ``interleaved``: see :func:`order_scales`.
    """
    groups = by_group(scale, interleaved)
    experts, count, rows = groups.shape
    pairs = scale.new_zeros(experts, -(-count // 2), rows, 2)
    for half in (0, 1):
        pairs[:, : (count + 1 - half) // 2, :, half].copy_(groups[:, half::2])
    return pairs


def by_group(values: Tensor, interleaved: bool) -> Tensor:
    """``values`` [E, rows, groups] as [E, groups, rows], rows as in :func:`order_scales`; a view where it can be."""
    return (interleave(values) if interleaved else values).transpose(1, 2)


def relative_scales(scale: Tensor, *, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """(``scale`` [E, rows, groups] over a number for each row, these numbers [E, rows]).

    With ``power_of_two`` no bit is lost, and the largest scale of a row lies in [0.5, 1), or from 2^127 on in [1, 2).
    Without, the number is that scale, or 1 where it is 0 or not finite: where kernels round scales to 16 bits, a row's
    largest is exact.
    """
    largest = scale.abs().amax(dim=2)
    if power_of_two:
        _, exponent = torch.frexp(largest)
        # 2^128 would be infinite
        unit = torch.exp2(exponent.clamp(max=127).float())
    else:
        unit = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    return scale / unit[:, :, None], unit


def powers_of(scales: Tensor) -> Tensor:
    """float32 [E]: powers of two, more than half of the largest finite one of an expert's ``scales``, 1 to 2^60.

    Numbers are made of a scale times 2^126 / power: of one from 2^62 on infinity or NaN.  A higher power would take
    the bits of the expert's other scales, and its product with 2^7, which multiplies sums, would be infinite.
    """
    finite = torch.where(scales.isfinite(), scales.abs(), 0.0)
    _, exponent = torch.frexp(finite.flatten(1).amax(dim=1).float())
    return torch.exp2((exponent - 1).clamp(0, _HIGHEST).float())


def relative_e8m0(scale: Tensor, counting: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """(int32 [E, rows, steps], float32 channel scales [E, rows]) of e8m0 bytes ``scale`` uint8 [E, rows, groups].

    A row's bytes are relative to its largest scale, whose byte becomes ``largest`` and whose value the scale of its
    channel; groups that are not ``counting`` (bool, of the scale's shape), all zeros, do not decide which that is.
    Bytes stop at 0: of scales that are 2^-``largest`` of the row's largest and less.  Code 255 makes its row NaN.
    """
    exponents = torch.where(counting | (scale == _NAN), scale, 0).short()
    top = exponents.amax(dim=2)
    relative = (largest + exponents - top[:, :, None]).clamp_min(0).to(torch.uint8)
    return F.pad(relative, (0, -relative.shape[2] % 4)).view(torch.int32), e8m0_to_float32(top)
