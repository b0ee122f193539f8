"""Power-of-two scales as DeepGEMM reads them on sm_100: four exponents in a word, rows first.

``words[r, c // 4]`` holds, from its low byte, the exponents of ``scale[r, c .. c + 3]``; a column's words lie next to
each other, rows padded to a multiple of four (16 bytes: the TMA's grain).
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_exponents(scale: Tensor, rows: int) -> Tensor:
    """[E, rows, ceil(groups / 4)] int32 of ``scale`` [E, rows / n, groups], float32 powers of two or uint8 e8m0.

    Each row of scales stands for n rows of weights.
    """
    exponents = scale if scale.dtype is torch.uint8 else (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    experts, grid, groups = exponents.shape
    exponents = torch.nn.functional.pad(exponents, (0, -groups % 4))
    words = exponents.contiguous().view(torch.int32).repeat_interleave(rows // grid, dim=1)
    out = words.new_zeros(experts, words.shape[2], rows + -rows % 4)
    out[:, :, :rows] = words.transpose(1, 2)
    return out.transpose(1, 2)[:, :rows]
