"""Codes of 4 and 8 bits: out of a tool's words, into canonical bytes.

Tools keep fields in int32 words, the lowest bits first; the bytes of such a word (little-endian) hold them in the same
order, so everything here works on bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """uint8 bytes [..., 4 * n] of int32 ``words`` [..., n], those of a row one after the other; a copy if need be."""
    found = words.contiguous()
    if found.stride(-1) != 1:
        # a row of one word counts as contiguous whatever its stride, and is not viewed as bytes
        found = found.clone(memory_format=torch.contiguous_format)
    return found.view(torch.uint8)


def fields(words: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n * 32 / bits] of int32 ``words`` [..., n], the lowest bits of a word first."""
    raw = bytes_of(words)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Canonical storage of uint8 ``codes`` [..., K]: of 4 bits two in a byte, even k low, [..., ceil(K/2)]."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # two codes at once: the upper byte's falls beside the lower byte's
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).view(torch.uint8)[..., 0::2].contiguous()


def rows_of_words(words: Tensor, bits: int, cols: int) -> Tensor:
    """Canonical storage of int32 ``words`` [..., ceil(cols * bits / 32)], whose fields lie along the row: their bytes.

    No copy where rows end with a whole byte.
    """
    raw = bytes_of(words)[..., : -(-cols * bits // 8)]
    if cols * bits % 8:
        raw = raw.clone()
        raw[..., -1] &= 15
    return raw
