"""e8m0 scales as the portable backend's kernel reads them."""

from __future__ import annotations

import torch
from moe_core.gemm.marlin.powers import relative_powers
from torch import Tensor

from moe_mxfp4.kernels.marlin_convert import counting_groups

#: the byte of a row's largest scale: see `moe_mxfp4.kernels.e2m1`
LARGEST = 253


def step_scales(codes: Tensor, scale: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(int32 [E, ceil(columns / 128), rows], float32 factors [E, rows]) of canonical weights ``codes`` and ``scale``.

    The bytes of four groups of a row, the first in the low bits, relative to the row's largest, which is its factor.
    """
    powers, factors = relative_powers(scale.view(torch.uint8), counting_groups(codes, columns), LARGEST)
    return powers.transpose(1, 2).contiguous(), factors
