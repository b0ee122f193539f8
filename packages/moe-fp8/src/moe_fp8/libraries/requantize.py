"""Requantization for libraries whose layout has coarser scales than the checkpoint.

Each weight is rounded once more, to e4m3 with its new scale. New scales are never smaller, so nothing saturates. Rows
are converted to float32 in chunks, so only a few megabytes are needed in addition to the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: bytes of weights copied at a time; at least one expert
_CHUNK_BYTES = 256 << 20
#: number of values held as float32 at a time: fits a 50 MB cache
_WIDENED = 1 << 23


def shared_ratio(scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the largest scale of each expert and the factors that rescale its weights to it.

    Args:
        scale: float32 [E, parts].

    Returns:
        The largest scale and the factor, both of the shape of ``scale``; the factor is None if all parts already share
        the
        largest scale.
    """
    largest = scale.amax(dim=1, keepdim=True).expand_as(scale).contiguous()
    if torch.equal(largest, scale):
        return largest, None
    return largest, torch.where(largest > 0, scale / largest, 1.0)


def shared_scale(w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Requantize stacked matrices that have one scale each to the largest of them.

    Args:
        w: e4m3 [E, rows, K].
        scale: float32 [E, parts].

    Returns:
        The weights and their scales [E, parts] with equal columns. Nothing is copied if the scales were equal.
    """
    largest, ratio = shared_ratio(scale)
    return (w if ratio is None else rescaled(w, ratio)), largest


def power_of_two_scales(w: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Requantize block weights so that their scales are powers of two, rounded up.

    Args:
        w: e4m3 [E, rows, K]; rows and K are multiples of the block.
        scale: [E, rows / block, K / block].
        block: rows and columns per scale.

    Returns:
        The weights and their scales. Nothing is copied if the scales were powers of two.
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
    """Multiply stacked matrices [E, rows, K] by their ratios [E, parts] and round to e4m3.

    Args:
        w: e4m3 [E, rows, K].
        ratio: [E, parts], one factor per stacked matrix.

    Returns:
        e4m3 [E, rows, K].
    """
    return _rescaled(w, ratio[:, :, None], (w.shape[1] // ratio.shape[1], w.shape[2]))


def expert_slices(w: Tensor) -> Iterator[slice]:
    """Yield slices of experts, small enough to hold two copies in addition to the result.

    Args:
        w: weights [E, rows, K].
    """
    one = max(1, w[:1].numel() * w.element_size())
    step = max(1, min(_CHUNK_BYTES // (2 * one), w.shape[0] // 32))
    for start in range(0, w.shape[0], step):
        yield slice(start, start + step)


def _rescaled(w: Tensor, ratio: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply ``w`` by one ratio per block and round to e4m3."""
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
