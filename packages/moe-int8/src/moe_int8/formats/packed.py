"""Integer codes in compressed-tensors' packed words."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int, cols: int) -> Tensor:
    """Unpack int32 words to int8 codes.

    Fields of 4 or 8 bits along K, the lowest bits first, hold ``code + 2**(bits - 1)``.

    Args:
        words: int32 [..., ceil(cols * bits / 32)].
        bits: bits per code, 4 or 8.
        cols: number of codes per row.

    Returns:
        int8 [..., cols].
    """
    raw = words.contiguous().view(torch.uint8)
    if bits == 4:
        raw = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    # adding 128 flips the sign bit
    codes = (raw ^ 0x80).view(torch.int8) if bits == 8 else raw.view(torch.int8) - 8
    return codes[..., :cols].contiguous()
