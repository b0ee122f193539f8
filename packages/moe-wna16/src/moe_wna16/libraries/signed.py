"""Conversion between offset-binary and signed int4 codes.

A canonical code c stands for c - 8. Kernels' int4 is the same number in two's complement, so the highest bit of every
code is flipped.
"""

from __future__ import annotations

from torch import Tensor

_HIGHEST = 0x88


def signed_int4(w: Tensor) -> Tensor:
    """Convert bytes of two unsigned codes (value = code - 8) to bytes of two signed codes.

    Args:
        w: uint8 codes.

    Returns:
        A new tensor of the same shape.
    """
    return w ^ _HIGHEST
