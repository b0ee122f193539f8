"""e8m0 scales of weights that kernels read in the checkpoint's layout."""

from __future__ import annotations

import torch
from moe_core import DeviceInfo
from moe_core.api.experts import relative_e8m0
from torch import Tensor

from moe_mxfp4.groups import counting_groups, without_groups

#: byte of a row's largest scale: see `moe_mxfp4.kernels.e2m1`
LARGEST = 253
#: byte of a row's largest scale for block-scaled MMA: 2**0
LARGEST_SCALED = 127
#: power of a row's largest scale with e4m3: 6 times 2^(11 - 5) is the largest e2m1 value that e4m3 represents
LARGEST_E4M3 = 11


def has_scaled_units(device: DeviceInfo) -> bool:
    """Return whether the device has block-scaled MMA: sm_100 family, gfx950.

    Args:
        device: description of the device.
    """
    return 100 <= device.capability < 120 or device.arch == "gfx950"


def step_scales(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Convert scales to words of four groups, relative to the row's largest scale.

    Args:
        codes: canonical codes.
        scale: canonical e8m0 scales.
        columns: number of columns.

    Returns:
        int32 [E, ceil(columns / 128), rows], the bytes of four groups of a row, the first in the low bits; and float32
        channel scales [E, rows], the row's largest scale.
    """
    powers, channel_scales = _relative(codes, scale, columns, LARGEST)
    return powers.transpose(1, 2).contiguous(), channel_scales


def group_scales(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Convert scales to bytes for block-scaled MMA, relative to the row's largest scale.

    Byte 0 is 2^-127, not 0: the codes must be those of :func:`without_small_groups`.

    Args:
        codes: canonical codes.
        scale: canonical e8m0 scales.
        columns: number of columns.

    Returns:
        uint8 [E, rows, groups padded to 4], and float32 channel scales [E, rows].
    """
    powers, channel_scales = _relative(codes, scale, columns, LARGEST_SCALED)
    return powers.view(torch.uint8), channel_scales


def without_small_groups(codes: Tensor, scale: Tensor, columns: int, largest: int) -> Tensor:
    """Zero the groups whose scale is at most 2^-(``largest`` + 1) of their row's largest.

    The error is at most 6 * 2^-(``largest`` + 1) of the row's largest scale. Synchronizes with the device.

    Args:
        codes: canonical codes.
        scale: canonical e8m0 scales.
        columns: number of columns.
        largest: power of a row's largest scale.

    Returns:
        A copy, or ``codes`` itself if there are no such groups.
    """
    counting = counting_groups(codes, columns)
    powers, _ = powers_above(scale, counting, largest)
    small = (powers[:, :, : scale.shape[2]] == 0) & counting
    # meta tensors have no values
    return codes if codes.is_meta or not bool(small.any()) else without_groups(codes, ~small)


def powers_above(scale: Tensor, counting: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return the groups' powers plus one and each row's largest scale.

    Args:
        scale: canonical e8m0 scales.
        counting: bool [E, rows, groups], groups with nonzero values.
        largest: power of a row's largest scale.

    Returns:
        uint8 [E, rows, groups padded to 4], 0 for scales below power 0; and float32 [E, rows].
    """
    powers, top = relative_e8m0(scale.view(torch.uint8), counting, largest + 1)
    return powers.view(torch.uint8), top


def _relative(codes: Tensor, scale: Tensor, columns: int, largest: int) -> tuple[Tensor, Tensor]:
    return relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), largest)
