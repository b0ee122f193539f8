"""Quant keys of this scheme, as patterns for claims."""

from __future__ import annotations

from dataclasses import replace

import torch
from moe_core import GroupShape, KeyPattern, QuantKey, kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym

#: columns that share a scale: 32, 64, 128, a whole row
GROUPS = tuple(GroupShape(1, columns) for columns in (32, 64, 128, -1))
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: the four element types: int4, int4 with zero points, int8, int8 with zero points
BASES = (kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym)


def every_key(base: QuantKey) -> KeyPattern:
    """Match all groups, scale dtypes, column orders and input factors of an element type.

    Args:
        base: key of the element type.

    Returns:
        The pattern for claims.
    """
    return KeyPattern(base, GROUPS, SCALE_DTYPES, permuted=(False, True), pre_scaled=(False, True))


def in_order(base: QuantKey) -> KeyPattern:
    """Match :func:`every_key` without activation order.

    Args:
        base: key of the element type.

    Returns:
        The pattern for claims.
    """
    return replace(every_key(base), permuted=None)
