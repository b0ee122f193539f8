"""Bit operations on int32 words, for tensors and (compiled) for tiles."""

from __future__ import annotations


def columns_apart(words):
    """Move even columns to the low half of each word and odd columns to the high half.

    Args:
        words: int32 words; even columns are the low four bits of each byte.

    Returns:
        The reordered words.
    """
    change = (words ^ (words >> 4)) & 0x00F000F0
    words = words ^ change ^ (change << 4)
    change = (words ^ (words >> 8)) & 0x0000FF00
    return words ^ change ^ (change << 8)


def e2m1_bits(words):
    """Rearrange the bits of e2m1 codes for dequantization by rotation.

    Args:
        words: int32 words.

    Returns:
        Words in the bit layout that `moe_core.kernels.gemm.fragments.fragment_order` lists.
    """
    second = words >> 4
    third = words >> 8
    fourth = words >> 12
    # Sign at bit 15, the remaining bits at 8 to 6, of both halves.
    out = ((words & 0x00070007) << 6) | ((words & 0x00080008) << 12)
    second = ((second & 0x00070007) << 6) | ((second & 0x00080008) << 12)
    third = ((third & 0x00070007) << 6) | ((third & 0x00080008) << 12)
    last = fourth & 0x00010001
    fourth = ((fourth & 0x00060006) << 6) | ((fourth & 0x00080008) << 12)
    # Rotated right by 4, 10 and 14.
    out = out | ((second >> 4) & 0x0FFFFFFF) | (second << 28)
    out = out | ((third >> 10) & 0x003FFFFF) | (third << 22)
    return out | ((fourth >> 14) & 0x0003FFFF) | (fourth << 18) | last


def signs_apart(words):
    """Separate the signs of 4-bit codes from their magnitudes.

    Args:
        words: int32 words.

    Returns:
        Words with the signs of the low half at bits 8j + 7, and those of the high half at bits 8j + 3.
    """
    high = words >> 16
    low = ((words & 8) << 4) | ((words & 0x80) << 8) | ((words & 0x800) << 12) | ((words & 0x8000) << 16)
    high = (high & 8) | ((high & 0x80) << 4) | ((high & 0x800) << 8) | ((high & 0x8000) << 12)
    return (words & 0x77777777) | low | high
