"""Conversion of 4- and 8-bit codes from a tool's words to canonical bytes.

Tools store fields in int32 words, the lowest bits first. The bytes of such a word (little-endian) hold the fields in
the same order, so all functions here work on bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """Return the bytes of int32 words, contiguous along the rows; copies only if needed.

    Args:
        words: int32 [..., n].

    Returns:
        uint8 [..., 4 * n].
    """
    found = words.contiguous()
    if found.stride(-1) != 1:
        # a row of one word counts as contiguous whatever its stride, but cannot be viewed as bytes
        found = found.clone(memory_format=torch.contiguous_format)
    return found.view(torch.uint8)


def fields(words: Tensor, bits: int) -> Tensor:
    """Unpack the fields of int32 words, the lowest bits first.

    Args:
        words: int32 [..., n].
        bits: bits per field, 4 or 8.

    Returns:
        uint8 [..., n * 32 / bits].
    """
    raw = bytes_of(words)
    return raw if bits == 8 else torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes into canonical storage.

    Args:
        codes: uint8 [..., K].
        bits: bits per code.

    Returns:
        8 bits: ``codes`` itself. 4 bits: [..., ceil(K/2)], two per byte, even columns low.
    """
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # two codes at once: the upper byte's code moves next to the lower byte's
    pairs = codes.contiguous().view(torch.int16)
    return (pairs | (pairs >> 4)).view(torch.uint8)[..., 0::2].contiguous()


def rows_of_words(words: Tensor, bits: int, cols: int) -> Tensor:
    """Convert words whose fields run along the row to canonical storage: their bytes.

    Nothing is copied if rows end with a whole byte.

    Args:
        words: int32 [..., ceil(cols * bits / 32)].
        bits: bits per field.
        cols: number of columns.

    Returns:
        uint8 [..., ceil(cols * bits / 8)].
    """
    raw = bytes_of(words)[..., : -(-cols * bits // 8)]
    if cols * bits % 8:
        raw = raw.clone()
        raw[..., -1] &= 15
    return raw
