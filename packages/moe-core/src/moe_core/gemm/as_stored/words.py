"""Canonical packed weights as 32-bit words.  Pure, on any device; what already fits is passed through."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def as_words(codes: Tensor) -> Tensor:
    """uint8 [E, rows, bytes] as int32 [E, rows, ceil(bytes / 4)]: a view, or, where rows are no whole words, padded.

    Padded rows start at multiples of 16 bytes.
    """
    if codes.shape[2] % 4:
        codes = F.pad(codes, (0, -codes.shape[2] % 16))
    elif codes.stride(2) != 1 or any(number % 4 for number in (codes.storage_offset(), *codes.stride()[:2])):
        codes = codes.clone(memory_format=torch.contiguous_format)
    return codes.view(torch.int32)
