"""Scales, zero points and groups of columns of canonical weights beside weights that are read as stored.

Pure, on any device; what already fits is passed through.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def by_group(scale: Tensor, times: int = 1) -> Tensor:
    """[E, rows, groups] as [E, times * groups, rows], contiguous; each group ``times`` times."""
    return scale.transpose(1, 2).repeat_interleave(times, dim=1).contiguous()


def zero_points(zero_point: Tensor, bits: int) -> Tensor:
    """In uint8 or, beside 8 bits, in int16, since a zero point may be one more than any code."""
    return zero_point.to(torch.uint8 if bits == 4 else torch.int16)


def arranged_groups(g_idx: Tensor, bits: int, multiple: int) -> Tensor:
    """The groups of columns, int32 [E, K], in the order of `arrange` of `moe_core.kernels.gemm.as_stored.tiles`;
    padded."""
    codes = 32 // bits
    padded = F.pad(g_idx, (0, -g_idx.shape[1] % multiple))
    units = padded.view(padded.shape[0], -1, 4, 2, codes // 2)
    return units.permute(0, 1, 4, 2, 3).reshape(padded.shape).contiguous()
