"""Power-of-two scales in DeepGEMM's sm_100 layout: four exponents per word, column-major.

``words[r, c // 4]`` holds the exponents of ``scale[r, c .. c + 3]``, lowest byte first. Words are stored column-major,
with rows padded to a multiple of four (16 bytes, the TMA's granularity).
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_exponents(scale: Tensor, rows: int) -> Tensor:
    """Pack scales into DeepGEMM's exponent words.

    Args:
        scale: [E, rows / n, groups], float32 powers of two or uint8 e8m0; each row of scales covers n rows of weights.
        rows: number of weight rows.

    Returns:
        int32 [E, rows, ceil(groups / 4)].
    """
    exponents = scale if scale.dtype is torch.uint8 else (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    experts, grid, groups = exponents.shape
    exponents = torch.nn.functional.pad(exponents, (0, -groups % 4))
    words = exponents.contiguous().view(torch.int32).repeat_interleave(rows // grid, dim=1)
    out = words.new_zeros(experts, words.shape[2], rows + -rows % 4)
    out[:, :, :rows] = words.transpose(1, 2)
    return out.transpose(1, 2)[:, :rows]
