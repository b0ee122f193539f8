"""Canonical MXFP4 weights as `moe_mxfp4.kernels.e4m3` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core import e8m0_to_float32
from moe_core.experts_api import order_words
from torch import Tensor
from torch.nn import functional as F

from moe_mxfp4.groups import counting_groups, without_groups

#: power of a row's largest scale: 6 times 2^(11 - 5) is the largest number of e2m1 that e4m3 holds
LARGEST = 11
#: 2 to the power 0 stands for
_BIAS = 5
_NAN = 255


@dataclass(frozen=True, eq=False)
class E4m3Matrix:
    """``words`` int32 [E, rows, words], ``scales`` float32 [E, rows, 1], ``powers`` int32 [E, steps, rows]."""

    words: Tensor
    scales: Tensor
    powers: Tensor


def convert_to_e4m3(codes: Tensor, scale: Tensor, columns: int) -> E4m3Matrix:
    """One of the two matrices of canonical weights; see :class:`moe_core.weights.MoEWeights` for the tensors.

    Groups that :func:`without_small_groups` leaves out become zeros.  Code 255 stays NaN.
    """
    powers, top = _powers(codes, scale, columns)
    kept = powers >= 0
    words = order_words(without_groups(codes, kept), columns, 4, order="e4m3")
    powers = torch.where(kept, powers, 0).to(torch.uint8)
    powers = F.pad(powers, (0, -powers.shape[2] % 4)).view(torch.int32)
    scales = e8m0_to_float32(top.to(torch.uint8)) * 2.0 ** (_BIAS - LARGEST)
    return E4m3Matrix(words, scales[:, :, None], powers.transpose(1, 2).contiguous())


def without_small_groups(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    """``codes`` with zeros in groups whose scale is 2^-12 of their row's largest and less; ``codes`` if there are none.

    At most 6/4096 of the largest value that the other groups can hold is lost.  Waits for the device.
    """
    powers, _ = _powers(codes, scale, columns)
    small = (powers < 0) & counting_groups(codes, columns)
    return without_groups(codes, ~small) if bool(small.any()) else codes


def _powers(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Powers of groups [E, rows, groups] int16, negative for those that are left out, and each row's largest scale."""
    exponents = scale.view(torch.uint8).short()
    counting = counting_groups(codes, columns) | (exponents == _NAN)
    top = torch.where(counting, exponents, 0).amax(dim=2)
    return torch.where(counting, exponents - top[:, :, None] + LARGEST, -1), top
