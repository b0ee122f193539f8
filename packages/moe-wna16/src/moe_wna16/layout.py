"""Conversion of canonical scales, zero points and column groups for unrepacked weights.

The functions are pure and work on any device. What already fits is passed through.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def by_group(scale: Tensor, times: int = 1) -> Tensor:
    """Transpose group values [E, rows, groups] to contiguous [E, times * groups, rows].

    Args:
        scale: [E, rows, groups].
        times: how often each group is repeated.

    Returns:
        [E, times * groups, rows].
    """
    return scale.transpose(1, 2).repeat_interleave(times, dim=1).contiguous()


def zero_points(zero_point: Tensor, bits: int) -> Tensor:
    """Convert zero points to uint8, or to int16 for 8 bits: they may exceed any code by one.

    Args:
        zero_point: zero points of any integer dtype.
        bits: bits per code.

    Returns:
        uint8 or int16 of the same shape.
    """
    return zero_point.to(torch.uint8 if bits == 4 else torch.int16)


def arranged_groups(g_idx: Tensor, bits: int, multiple: int) -> Tensor:
    """Pad the column groups and reorder them like `arrange`.

    See `moe_core.kernels.gemm.as_stored.tiles`.

    Args:
        g_idx: int32 [E, K].
        bits: bits per code.
        multiple: K is padded to a multiple of this.

    Returns:
        int32 [E, K padded].
    """
    codes = 32 // bits
    padded = F.pad(g_idx, (0, -g_idx.shape[1] % multiple))
    units = padded.view(padded.shape[0], -1, 4, 2, codes // 2)
    return units.permute(0, 1, 4, 2, 3).reshape(padded.shape).contiguous()
