"""Conversion of canonical e4m3 weights to the layout of `moe_fp8.kernels.marlin_e4m3`.

Quantizers assign arbitrary scales to all-zero groups. These are ignored here: they do not affect a row's reference
scale. A non-finite scale stays non-finite.
"""

from __future__ import annotations

import torch
from moe_core import GroupShape, QuantKey, e8m0_to_float32, is_e8m0, kMxfp8Static
from moe_core.api.experts import interleave, order_words, relative_e8m0, relative_scales
from moe_core.api.kernels import Converted
from torch import Tensor
from torch.nn import functional as F

#: rows of a half per stored block scale: every block height is a multiple
_ROWS = 64
#: byte of a row's largest MXFP8 scale: a bfloat16 exponent of 120
_LARGEST = 247


def convert_e4m3(weights: Tensor, scale: Tensor, key: QuantKey, *, gated: bool = False) -> Converted:
    """Convert one of the two matrices of canonical weights.

    See :class:`moe_core.spec.weights.MoEWeights` for the tensors.

    Args:
        weights: e4m3 [E, rows, K].
        scale: scales in canonical form.
        key: quantization of the weights.
        gated: rows are gate, then up; they are interleaved in blocks of 8.

    Returns:
        Words and scales in the kernels' layout.
    """
    codes, parts, shape = weights.view(torch.uint8), 2 if gated else 1, key.group_shape
    rows, columns = codes.shape[1:]
    words = order_words(codes, columns, 8, interleaved=gated)
    if key == kMxfp8Static:
        scales, channel_scales = relative_e8m0(scale.view(torch.uint8), _counting(codes, shape, parts), _LARGEST)
        return Converted.of(words, scales, 32, channel_scales, interleaved=gated)
    wide = e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale
    if shape.is_per_tensor:
        wide = wide.repeat_interleave(rows // parts, 1)[:, :, None]
    if shape.is_per_tensor or shape.is_per_row:
        return Converted.of(words, wide, -1, interleaved=gated)
    counting = torch.where(_counting(codes, shape, parts) | ~wide.isfinite(), wide, 0.0)
    scales, largest = relative_scales(counting, power_of_two=False)
    # the block rows of each part end separately
    channel_scales = _repeat(largest[:, :, None], shape.row, rows // parts, parts)[:, :, 0]
    scales = _repeat(scales, shape.row // _ROWS, -(-(rows // parts) // _ROWS), parts)
    return Converted(
        words, _in_pairs(scales, gated), shape.col, interleave(channel_scales) if gated else channel_scales
    )


def _in_pairs(scales: Tensor, gated: bool) -> Tensor:
    """Rearrange [E, block rows, groups] into scale pairs, one for every 128 rows of words."""
    experts, count, groups = scales.shape
    scales = F.pad(scales, (0, groups % 2, 0, count % 2))
    shape = (experts, 2, -1, groups + groups % 2) if gated else (experts, -1, 2, groups + groups % 2)
    pairs = scales.view(shape).movedim(1 if gated else 2, 3)
    return pairs.flatten(2).contiguous()


def _repeat(values: Tensor, times: int, rows: int, parts: int) -> Tensor:
    """Repeat each row of [E, parts * R, C] ``times``, keeping the first ``rows`` of every part."""
    experts, blocks, groups = values.shape
    repeated = values.view(experts, parts, blocks // parts, groups).repeat_interleave(times, 2)
    return repeated[:, :, :rows].flatten(1, 2)


def _counting(codes: Tensor, shape: GroupShape, parts: int) -> Tensor:
    """Return bool of the scales' shape: whether a group has nonzero values."""
    experts, rows, columns = codes.shape
    grid = shape.grid(rows // parts, columns)
    out = torch.empty(experts, parts * grid[0], grid[1], dtype=torch.bool, device=codes.device)
    missing = (0, grid[1] * shape.col - columns, 0, grid[0] * shape.row - rows // parts)
    # expert by expert: magnitudes take as much memory as the weights
    for found, one in zip(out, codes, strict=True):
        magnitudes = F.pad((one & 0x7F).view(parts, rows // parts, columns), missing)
        groups = magnitudes.view(parts * grid[0], shape.row, grid[1], shape.col)
        found.copy_(groups.amax(dim=(1, 3)) > 0)
    return out
