"""Integer codes in the words of compressed-tensors' packed form."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, cols: int) -> Tensor:
    """int8 codes [rows, cols] of int32 ``words`` [rows, ceil(cols * bits / 32)].

    Fields of 4 or 8 bits along K, the lowest bits first, hold ``code + 2**(bits - 1)``.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    half = 1 << (bits - 1)
    fields = (words.unsqueeze(-1) >> shifts) & (2 * half - 1)
    return (fields - half).to(torch.int8).flatten(-2)[..., :cols].contiguous()
