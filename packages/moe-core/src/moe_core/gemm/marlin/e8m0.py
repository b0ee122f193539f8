"""e8m0 scales of 32 columns each as the family reads them; `moe_core.gemm.marlin.operand.step_e8m0` is the reader."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_core.numerics import e8m0_to_float32

#: e8m0's NaN
_NAN = 255


def relative_e8m0(scale: Tensor, counting: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """(int32 [E, rows, steps], float32 channel scales [E, rows]) of e8m0 bytes ``scale`` uint8 [E, rows, groups].

    A row's bytes are relative to its largest scale, whose byte becomes ``largest`` and whose value the scale of its
    channel; groups that are not ``counting`` (bool, of the scale's shape), all zeros, do not decide which that is.
    Code 255 stays NaN.
    """
    exponents = torch.where(counting | (scale == _NAN), scale, 0).short()
    top = exponents.amax(dim=2)
    relative = (largest + exponents - top[:, :, None]).clamp_min(0).to(torch.uint8)
    return F.pad(relative, (0, -relative.shape[2] % 4)).view(torch.int32), e8m0_to_float32(top)
