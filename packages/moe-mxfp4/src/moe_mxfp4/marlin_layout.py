"""Canonical MXFP4 weights as kernels read them; see :class:`moe_core.weights.MoEWeights` for the tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core.experts_api import order_words, relative_e8m0
from moe_core.kernel_api import Converted
from torch import Tensor

from moe_mxfp4.groups import GROUP, counting_groups, without_groups
from moe_mxfp4.scales import LARGEST

#: power of a row's largest scale beside e4m3: 6 times 2^(11 - 5) is the largest number of e2m1 that e4m3 holds
LARGEST_E4M3 = 11
#: 2 to the power 0 stands for
_BIAS = 5


def convert_e2m1(codes: Tensor, scale: Tensor, columns: int, *, gated: bool = False) -> Converted:
    """One of the two matrices as `moe_mxfp4.kernels.marlin_e2m1` reads it.

    ``codes`` uint8 [E, rows, ceil(columns / 2)]; ``gated``: rows are gate, then up, and are interleaved in blocks of 8.
    """
    words = order_words(codes, columns, 4, order="e2m1", interleaved=gated)
    scales, channel_scales = relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), LARGEST)
    return Converted.of(words, scales, GROUP, channel_scales, interleaved=gated)


@dataclass(frozen=True, eq=False)
class E4m3Matrix:
    """``words`` int32 [E, steps, rows, words], ``scales`` float32 [E, rows, 1], ``powers`` int32 [E, steps, rows]."""

    words: Tensor
    scales: Tensor
    powers: Tensor


def convert_to_e4m3(codes: Tensor, scale: Tensor, columns: int) -> E4m3Matrix:
    """One of the two matrices as `moe_mxfp4.kernels.e4m3` reads it.

    Groups that :func:`without_small_groups` leaves out become zeros.  Code 255 stays NaN.
    """
    powers, top = _powers(scale, counting_groups(codes, columns))
    words = order_words(without_groups(codes, powers[:, :, : scale.shape[2]] > 0), columns, 4, order="e4m3")
    powers = (powers.clamp_min(1) - 1).view(torch.int32)
    return E4m3Matrix(words, top[:, :, None] * 2.0 ** (_BIAS - LARGEST_E4M3), powers.transpose(1, 2).contiguous())


def without_small_groups(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    """``codes`` with zeros in groups whose scale is 2^-12 of their row's largest and less; ``codes`` if there are none.

    At most 6/4096 of the largest value that the other groups can hold is lost.  Waits for the device.
    """
    counting = counting_groups(codes, columns)
    powers, _ = _powers(scale, counting)
    small = (powers[:, :, : scale.shape[2]] == 0) & counting
    return without_groups(codes, ~small) if bool(small.any()) else codes


def _powers(scale: Tensor, counting: Tensor) -> tuple[Tensor, Tensor]:
    """Powers of groups plus one, uint8 [E, rows, groups padded to steps], 0: small; and each row's largest scale."""
    powers, top = relative_e8m0(scale.view(torch.uint8), counting, LARGEST_E4M3 + 1)
    return powers.view(torch.uint8), top
