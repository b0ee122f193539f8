"""Offset-binary codes and signed ones.

A canonical code c stands for c - 8; what kernels call int4 is the same number in two's complement: the highest bit of
every code is the other way round.
"""

from __future__ import annotations

from torch import Tensor

_HIGHEST = 0x88


def signed_int4(w: Tensor) -> Tensor:
    """Bytes of two unsigned codes (value = code - 8) as bytes of two signed ones: a new tensor of the same shape."""
    return w ^ _HIGHEST
