"""Weights quantised anew where a library's layout has coarser scales than the checkpoint.

Both functions round a weight once more, to e4m3 under its new scale; new scales are never smaller, so nothing
saturates.  Expert by expert: they need the memory of one expert in float32 beside the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shared_scale(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stacked matrices with one scale each, [E, rows, K] e4m3 and [E, parts] float32, under the largest of them.

    Returns the weights and their scales, [E, parts] with equal columns.  Nothing is copied where they were equal.
    """
    largest = scale.amax(dim=1, keepdim=True).expand_as(scale).contiguous()
    if torch.equal(largest, scale):
        return w, scale
    ratio = torch.where(largest > 0, scale / largest, 1.0)
    return _rescaled(w, ratio[:, :, None], (w.shape[1] // scale.shape[1], w.shape[2])), largest


def power_of_two_scales(w: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Block weights [E, rows, K] e4m3 with scales [E, rows / block, K / block] rounded up to powers of two.

    ``rows`` and K are multiples of the block.  Nothing is copied where they were powers of two.
    """
    mantissa, exponent = torch.frexp(scale)
    # frexp: scale = mantissa * 2**exponent with mantissa in [0.5, 1)
    rounded = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    rounded = torch.where(scale > 0, rounded, scale)
    if torch.equal(rounded, scale):
        return w, scale
    return _rescaled(w, torch.where(scale > 0, scale / rounded, 1.0), block), rounded


def _rescaled(w: Tensor, ratio: Tensor, block: tuple[int, int]) -> Tensor:
    """``w`` times one ratio per block of rows and columns, rounded to e4m3."""
    out = torch.empty_like(w)
    rows, cols = block
    for expert in range(w.shape[0]):
        factor = ratio[expert].repeat_interleave(rows, 0).repeat_interleave(cols, 1)
        out[expert] = (w[expert].float() * factor).to(w.dtype)
    return out
