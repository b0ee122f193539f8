"""Static scales and zero points of activations that gate and up share."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_input(scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Merge the static scales and zero points of several projections.

    Equal ones are kept. Otherwise the result covers the smallest range that contains all of theirs, so that none clips.
    For symmetric quantization this is the largest scale.

    Args:
        scale: [E, P], one per projection.
        zero_point: [E, P], or None for symmetric quantization.

    Returns:
        The scale [E] and the zero point int32 [E], or None.
    """
    if zero_point is None:
        return scale.amax(dim=1), None
    alike = ((scale == scale[:, :1]) & (zero_point == zero_point[:, :1])).all(dim=1)
    wide, zero = scale.double(), zero_point.double()
    low, high = ((-128 - zero) * wide).amin(dim=1), ((127 - zero) * wide).amax(dim=1)
    width = (high - low) / 255
    merged = (-128 - low / width).round().clamp(-128, 127)
    return torch.where(alike, scale[:, 0], width.float()), torch.where(alike, zero_point[:, 0], merged.to(torch.int32))
