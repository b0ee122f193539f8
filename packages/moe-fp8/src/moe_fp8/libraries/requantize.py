"""Weights quantised anew where a library's layout has coarser scales than the checkpoint.

A weight is rounded once more, to e4m3 under its new scale; new scales are never smaller, so nothing saturates.  Values
are widened to float32 some rows after the others, so that beside the result a few megabytes are needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: bytes of weights that are copied at a time; one expert at least
_CHUNK_BYTES = 256 << 20
#: values that are float32 at a time: few enough for a cache of 50 MB
_WIDENED = 1 << 23


def shared_ratio(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """The largest scale of each expert, and what its weights' values are to be multiplied by under it.

    ``scale`` [E, parts] float32; both results have its shape.  None where all parts had the largest already.
    """
    largest = scale.amax(dim=1, keepdim=True).expand_as(scale).contiguous()
    if torch.equal(largest, scale):
        return largest, None
    return largest, torch.where(largest > 0, scale / largest, 1.0)


def shared_scale(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stacked matrices with one scale each, [E, rows, K] e4m3 and [E, parts] float32, under the largest of them.

    Returns the weights and their scales, [E, parts] with equal columns.  Nothing is copied where they were equal.
    """
    largest, ratio = shared_ratio(scale)
    return (w if ratio is None else rescaled(w, ratio)), largest


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
    ratio = torch.where(scale > 0, scale / rounded, 1.0)
    return _rescaled(w, ratio, block), rounded


def rescaled(w: Tensor, ratio: Tensor) -> Tensor:
    """Stacked matrices [E, rows, K] times their ratios [E, parts], rounded to e4m3."""
    return _rescaled(w, ratio[:, :, None], (w.shape[1] // ratio.shape[1], w.shape[2]))


def expert_slices(w: Tensor) -> Iterator[slice]:
    """Some experts of ``w`` [E, rows, K] after the others, few enough to hold two copies of them beside the result."""
    one = max(1, w[:1].numel() * w.element_size())
    step = max(1, min(_CHUNK_BYTES // (2 * one), w.shape[0] // 32))
    for start in range(0, w.shape[0], step):
        yield slice(start, start + step)


def _rescaled(w: Tensor, ratio: Tensor, block: tuple[int, int]) -> Tensor:
    """``w`` times one ratio per block of rows and columns, rounded to e4m3."""
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    height, width = block
    experts, rows, cols = w.shape
    total, shape = experts * rows, (experts * rows, cols // width, width)
    source, target = w.contiguous().view(shape), out.view(shape)
    ratio = ratio.flatten(0, 1)
    step = max(1, _WIDENED // cols)
    for start in range(0, total, step):
        some = slice(start, start + step)
        row = torch.arange(start, min(start + step, total), device=w.device)
        target[some].copy_(source[some].float().mul_(ratio[row // height, :, None]))
    return out
