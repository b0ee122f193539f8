"""Conversion of canonical MXFP4 weights to the Marlin-class kernels' layout.

See :class:`moe_core.spec.weights.MoEWeights` for the canonical tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core.api.experts import order_words, relative_e8m0
from moe_core.api.kernels import Converted
from torch import Tensor

from moe_mxfp4.groups import GROUP, counting_groups, without_groups
from moe_mxfp4.scales import LARGEST, LARGEST_E4M3, powers_above

#: power 0 stands for 2 to the minus this
_BIAS = 5


def convert_e2m1(codes: Tensor, scale: Tensor, columns: int, *, gated: bool = False) -> Converted:
    """Convert one of the two matrices for `moe_mxfp4.kernels.marlin_e2m1`.

    Args:
        codes: uint8 [E, rows, ceil(columns / 2)].
        scale: e8m0 [E, rows, ceil(columns / 32)].
        columns: number of columns.
        gated: rows are gate, then up; they are interleaved in blocks of 8.

    Returns:
        Words and scales in the kernels' layout.
    """
    words = order_words(codes, columns, 4, order="e2m1", interleaved=gated)
    scales, channel_scales = relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), LARGEST)
    return Converted.of(words, scales, GROUP, channel_scales, interleaved=gated)


@dataclass(frozen=True, eq=False)
class E4m3Matrix:
    """One matrix in the layout of `moe_mxfp4.kernels.e4m3`.

    Attributes:
        words: int32 [E, steps, rows, words].
        scales: float32 [E, rows, 1].
        powers: int32 [E, steps, rows].
    """

    words: Tensor
    scales: Tensor
    powers: Tensor


def convert_to_e4m3(codes: Tensor, scale: Tensor, columns: int) -> E4m3Matrix:
    """Convert one of the two matrices for `moe_mxfp4.kernels.e4m3`.

    Groups that :func:`moe_mxfp4.scales.without_small_groups` drops become zeros. The scale code 255 stays NaN.

    Args:
        codes: uint8 [E, rows, ceil(columns / 2)].
        scale: e8m0 [E, rows, ceil(columns / 32)].
        columns: number of columns.

    Returns:
        Words, scales and powers in the kernels' layout.
    """
    powers, top = powers_above(scale, counting_groups(codes, columns), LARGEST_E4M3)
    words = order_words(without_groups(codes, powers[:, :, : scale.shape[2]] > 0), columns, 4, order="e4m3")
    powers = (powers.clamp_min(1) - 1).view(torch.int32)
    return E4m3Matrix(words, top[:, :, None] * 2.0 ** (_BIAS - LARGEST_E4M3), powers.transpose(1, 2).contiguous())
