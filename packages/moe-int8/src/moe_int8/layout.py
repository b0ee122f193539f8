"""Conversion of canonical weights for the Triton backends."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(weights: Tensor) -> Tensor:
    """Sum the codes of each row.

    Args:
        weights: int8 [E, rows, K].

    Returns:
        int32 [E, rows].
    """
    # expert by expert: on some devices a sum first creates a wider copy
    sums = torch.empty(weights.shape[:2], dtype=torch.int32, device=weights.device)
    for expert, codes in zip(sums, weights, strict=True):
        expert.copy_(codes.sum(dim=1, dtype=torch.int32))
    return sums


def scale_and_zero(scale: Tensor, zero: Tensor) -> Tensor:
    """Pack scales and zero points into int64 words, the scale's bits in the low half.

    Args:
        scale: float32 [E].
        zero: int32 [E].

    Returns:
        int64 [E].
    """
    low = scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (zero.long() << 32) | low


def int4_half(group_size: int) -> int:
    """Return how many columns of a step the lower four bits hold; the upper ones hold as many.

    Args:
        group_size: columns per scale, -1 for channel scales.
    """
    return 64 if group_size == -1 else min(group_size, 64)


def pack_int4(codes: Tensor, half: int) -> Tensor:
    """Pack int4 codes in the kernels' order, two per byte.

    A step is ``2 * half`` columns in ``half`` bytes: column c is in the lower four bits of byte c, column c + half in
    the upper four. The last step is padded with zeros.

    Args:
        codes: int8 [E, rows, K], values -8 .. 7.
        half: columns in the lower bits of a step.

    Returns:
        uint8 [E, rows, steps * half].
    """
    experts, rows, columns = codes.shape
    steps = -(-columns // (2 * half))
    packed = torch.empty(experts, rows, steps * half, dtype=torch.uint8, device=codes.device)
    for out, one in zip(packed, codes, strict=True):
        whole = torch.nn.functional.pad(one, (0, steps * 2 * half - columns)).view(rows, steps, 2, half)
        low, high = whole[:, :, 0] & 15, whole[:, :, 1] << 4
        out.view(rows, steps, half).copy_((low | high).view(torch.uint8))
    return packed


def pack_unsigned_int4(codes: Tensor) -> Tensor:
    """Pack int4 codes plus 8, two per byte, the first in the low bits.

    Args:
        codes: int8 [E, rows, K], values -8 .. 7.

    Returns:
        uint8 [E, rows, K / 2].
    """
    experts, rows, columns = codes.shape
    packed = torch.empty(experts, rows, -(-columns // 2), dtype=torch.uint8, device=codes.device)
    for out, one in zip(packed, codes, strict=True):
        pairs = torch.nn.functional.pad(one + 8, (0, columns % 2), value=8).view(torch.uint8)
        out.copy_(pairs[:, 0::2] | pairs[:, 1::2] << 4)
    return packed


def group_scales(scale: Tensor, half: int, group_size: int) -> Tensor:
    """Transpose group scales, divide them by 16 and pad with zeros to whole steps.

    Args:
        scale: [E, rows, groups].
        half: columns in the lower bits of a step.
        group_size: columns per scale.

    Returns:
        float32 [E, groups padded to whole steps, rows].
    """
    groups = scale.shape[2]
    per_step = max(2 * half // group_size, 1)
    wide = torch.zeros(
        scale.shape[0], -(-groups // per_step) * per_step, scale.shape[1], dtype=torch.float32, device=scale.device
    )
    wide[:, :groups].copy_(scale.transpose(1, 2))
    return wide.mul_(1 / 16)


def scaled_row_sums(codes: Tensor, scale: Tensor) -> Tensor:
    """Sum the dequantized weights of each row.

    Args:
        codes: int8 [E, rows, K].
        scale: [E, rows, groups].

    Returns:
        float32 [E, rows].
    """
    sums = torch.empty(codes.shape[:2], dtype=torch.float32, device=codes.device)
    for out, one, own in zip(sums, codes, scale, strict=True):
        by_group = one.view(*own.shape, -1).sum(dim=2, dtype=torch.int32)
        out.copy_((by_group.double() * own.double()).sum(dim=1))
    return sums
