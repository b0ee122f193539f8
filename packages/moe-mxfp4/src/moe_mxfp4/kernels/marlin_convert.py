"""Canonical MXFP4 weights as `moe_mxfp4.kernels.marlin_e2m1` reads them."""

from __future__ import annotations

import torch
from moe_core.experts_api import interleave, order_words, relative_e8m0
from moe_core.kernel_api import Converted
from torch import Tensor

from moe_mxfp4.groups import GROUP, counting_groups
from moe_mxfp4.scales import LARGEST


def convert_e2m1(codes: Tensor, scale: Tensor, columns: int, *, gated: bool = False) -> Converted:
    """One of the two matrices of canonical weights; see :class:`moe_core.weights.MoEWeights` for the tensors.

    ``codes`` uint8 [E, rows, ceil(columns / 2)]; ``gated``: rows are gate, then up, and are interleaved in blocks of 8.
    """
    words = order_words(codes, columns, 4, order="e2m1", interleaved=gated)
    scales, channel_scales = relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), LARGEST)
    if gated:
        scales, channel_scales = interleave(scales), interleave(channel_scales)
    return Converted(words, scales.transpose(1, 2).contiguous(), GROUP, channel_scales)
