"""Canonical MXFP4 weights as `moe_mxfp4.kernels.marlin_e2m1` reads them."""

from __future__ import annotations

import torch
from moe_core.gemm.marlin.convert import Converted
from moe_core.gemm.marlin.powers import relative_powers
from moe_core.gemm.marlin.words import interleave, order_words
from torch import Tensor
from torch.nn import functional as F

from moe_mxfp4.scales import LARGEST

#: columns that share a scale
GROUP = 32


def convert_e2m1(codes: Tensor, scale: Tensor, columns: int, *, gated: bool = False) -> Converted:
    """One of the two matrices of canonical weights; see :class:`moe_core.weights.MoEWeights` for the tensors.

    ``codes`` uint8 [E, rows, ceil(columns / 2)]; ``gated``: rows are gate, then up, and are put in turns of 8.
    """
    words = order_words(codes, columns, 4, order="e2m1", interleaved=gated)
    scales, factors = relative_powers(scale.view(torch.uint8), counting_groups(codes, columns), LARGEST)
    if gated:
        scales, factors = interleave(scales), interleave(factors)
    return Converted(words, scales.transpose(1, 2).contiguous(), GROUP, factors)


def counting_groups(codes: Tensor, columns: int) -> Tensor:
    """bool [E, rows, groups]: which groups have numbers other than zero; to the others quantisers give any scale."""
    experts, rows, width = codes.shape
    groups = -(-columns // GROUP)
    out = torch.empty(experts, rows, groups, dtype=torch.bool, device=codes.device)
    # expert by expert: magnitudes take as much memory as the codes
    for found, one in zip(out, codes, strict=True):
        magnitudes = F.pad(one & 0x77, (0, groups * GROUP // 2 - width))
        found.copy_(magnitudes.view(rows, groups, GROUP // 2).amax(dim=2) > 0)
    return out
