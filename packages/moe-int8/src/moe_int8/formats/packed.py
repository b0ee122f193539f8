"""Integer codes in the words of compressed-tensors' packed form."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, cols: int) -> Tensor:
    """int8 codes [..., cols] of int32 ``words`` [..., ceil(cols * bits / 32)].

    Fields of 4 or 8 bits along K, the lowest bits first, hold ``code + 2**(bits - 1)``.
    """
    raw = words.contiguous().view(torch.uint8)
    if bits == 4:
        raw = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    # 128 more turns the sign bit around
    codes = (raw ^ 0x80).view(torch.int8) if bits == 8 else raw.view(torch.int8) - 8
    return codes[..., :cols].contiguous()
