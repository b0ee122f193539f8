"""e8m0 scales beside weights that are read as stored."""

from __future__ import annotations

import torch
from moe_core import DeviceInfo
from moe_core.experts_api import relative_e8m0
from torch import Tensor

from moe_mxfp4.groups import counting_groups

#: the byte of a row's largest scale: see `moe_mxfp4.kernels.e2m1`
LARGEST = 253
#: of one that tensor cores multiply: 2**0
LARGEST_SCALED = 127


def has_scaled_units(device: DeviceInfo) -> bool:
    """Whether tensor cores multiply codes with the scales of their groups: sm_100 and its family, gfx950."""
    return 100 <= device.capability < 120 or device.arch == "gfx950"


def step_scales(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(int32 [E, ceil(columns / 128), rows], float32 channel scales [E, rows]) of canonical weights ``codes`` and
    ``scale``.

    The bytes of four groups of a row, the first in the low bits, relative to the row's largest, which is its factor.
    """
    powers, channel_scales = _relative(codes, scale, columns, LARGEST)
    return powers.transpose(1, 2).contiguous(), channel_scales


def group_scales(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """As :func:`step_scales`, uint8 [E, rows, groups padded to 4]: bytes that tensor cores multiply."""
    powers, channel_scales = _relative(codes, scale, columns, LARGEST_SCALED)
    return powers.view(torch.uint8), channel_scales


def _relative(codes: Tensor, scale: Tensor, columns: int, largest: int) -> tuple[Tensor, Tensor]:
    return relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), largest)
