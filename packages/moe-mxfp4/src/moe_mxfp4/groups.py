"""Groups of columns that share a scale, in canonical codes: uint8 [E, rows, ceil(K / 2)], even columns low."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: columns that share a scale
GROUP = 32


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


def without_groups(codes: Tensor, kept: Tensor) -> Tensor:
    """``codes`` with zeros in the groups that are not ``kept`` (bool [E, rows, groups]); a copy."""
    out = torch.empty_like(codes)
    for target, one, keep in zip(out, codes, kept, strict=True):
        mask = keep.repeat_interleave(GROUP // 2, dim=1)[:, : one.shape[1]]
        torch.mul(one, mask, out=target)
    return out
