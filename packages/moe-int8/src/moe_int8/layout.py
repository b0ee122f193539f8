"""What the Triton backends make of canonical weights when they convert them."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(weights: Tensor) -> Tensor:
    """Sums of the codes of each row: int32 [E, rows] of int8 ``weights`` [E, rows, K]."""
    # expert by expert: a sum makes wider numbers first on some devices
    sums = torch.empty(weights.shape[:2], dtype=torch.int32, device=weights.device)
    for expert, codes in zip(sums, weights, strict=True):
        expert.copy_(codes.sum(dim=1, dtype=torch.int32))
    return sums


def scale_and_zero(scale: Tensor, zero: Tensor) -> Tensor:
    """Scales [E] float32 and zero points [E] int32 as one int64 each: the scale's bits in the low half."""
    low = scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (zero.long() << 32) | low
