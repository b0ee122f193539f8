"""e8m0 scales beside weights that are read as stored."""

from __future__ import annotations

import torch
from moe_core import DeviceInfo
from moe_core.api.experts import relative_e8m0
from torch import Tensor

from moe_mxfp4.groups import counting_groups, without_groups

#: the byte of a row's largest scale: see `moe_mxfp4.kernels.e2m1`
LARGEST = 253
#: of one that tensor cores multiply: 2**0
LARGEST_SCALED = 127
#: power of a row's largest scale beside e4m3: 6 times 2^(11 - 5) is the largest number of e2m1 that e4m3 holds
LARGEST_E4M3 = 11


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
    """As :func:`step_scales`, uint8 [E, rows, groups padded to 4]: bytes that tensor cores multiply.

    Byte 0 is 2^-127, not 0: codes are to be those of :func:`without_small_groups`.
    """
    powers, channel_scales = _relative(codes, scale, columns, LARGEST_SCALED)
    return powers.view(torch.uint8), channel_scales


def without_small_groups(codes: Tensor, scale: Tensor, columns: int, largest: int) -> Tensor:
    """``codes`` with zeros in groups whose scale is 2^-(``largest`` + 1) of their row's largest and less.

    Those are ``codes`` themselves if there are none.  At most 6 * 2^-(``largest`` + 1) of the row's largest scale is
    lost.  Waits for the device.
    """
    counting = counting_groups(codes, columns)
    powers, _ = powers_above(scale, counting, largest)
    small = (powers[:, :, : scale.shape[2]] == 0) & counting
    # tensors of device "meta" have no values
    return codes if codes.is_meta or not bool(small.any()) else without_groups(codes, ~small)


def powers_above(scale: Tensor, counting: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Powers of groups plus one, uint8 [E, rows, groups padded to 4], and each row's largest scale, float32 [E, rows].

    A row's largest scale is the power ``largest``; 0: smaller than that of power 0.
    """
    powers, top = relative_e8m0(scale.view(torch.uint8), counting, largest + 1)
    return powers.view(torch.uint8), top


def _relative(codes: Tensor, scale: Tensor, columns: int, largest: int) -> tuple[Tensor, Tensor]:
    return relative_e8m0(scale.view(torch.uint8), counting_groups(codes, columns), largest)
