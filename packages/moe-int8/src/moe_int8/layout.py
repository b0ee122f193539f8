"""What the Triton backends make of canonical weights when they convert them."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(weights: Tensor) -> Tensor:
    """Sums of the codes of each row: int32 [E, rows] of int8 ``weights`` [E, rows, K]."""
    # expert by expert: a sum makes wider numbers first on some devices
    sums = torch.empty(weights.shape[:2], dtype=torch.int32, device=weights.device)
    for expert, codes in zip(sums, weights, strict=True):
        expert.copy_(codes.sum(dim=1, dtype=torch.int32))
    return sums


def scale_and_zero(scale: Tensor, zero: Tensor) -> Tensor:
    """Scales [E] float32 and zero points [E] int32 as one int64 each: the scale's bits in the low half."""
    low = scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return (zero.long() << 32) | low


def int4_half(group_size: int) -> int:
    """Columns of a step in the lower four bits of bytes, and in the upper; ``group_size`` -1: scales by channel."""
    return 64 if group_size == -1 else min(group_size, 64)


def pack_int4(codes: Tensor, half: int) -> Tensor:
    """Codes of -8 .. 7, int8 [E, rows, K], two in a byte: uint8 [E, rows, steps * half].

    A step is ``2 * half`` columns in ``half`` bytes: column c in the lower four bits of byte c, column c + half in the
    upper one.  The last step is filled up with zeros.
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
    """Codes of -8 .. 7, int8 [E, rows, K], plus 8, two in a byte, the first in the low bits: uint8 [E, rows, K / 2]."""
    experts, rows, columns = codes.shape
    packed = torch.empty(experts, rows, -(-columns // 2), dtype=torch.uint8, device=codes.device)
    for out, one in zip(packed, codes, strict=True):
        pairs = torch.nn.functional.pad(one + 8, (0, columns % 2), value=8).view(torch.uint8)
        out.copy_(pairs[:, 0::2] | pairs[:, 1::2] << 4)
    return packed


def group_scales(scale: Tensor, half: int, group_size: int) -> Tensor:
    """Scales [E, rows, groups] as float32 [E, whole steps of groups, rows], over 16; those that do not exist are 0."""
    groups = scale.shape[2]
    per_step = max(2 * half // group_size, 1)
    wide = torch.zeros(
        scale.shape[0], -(-groups // per_step) * per_step, scale.shape[1], dtype=torch.float32, device=scale.device
    )
    wide[:, :groups].copy_(scale.transpose(1, 2))
    return wide.mul_(1 / 16)


def scaled_row_sums(codes: Tensor, scale: Tensor) -> Tensor:
    """Sums of the weights' rows, float32 [E, rows], of ``codes`` [E, rows, K] with ``scale`` [E, rows, groups]."""
    sums = torch.empty(codes.shape[:2], dtype=torch.float32, device=codes.device)
    for out, one, own in zip(sums, codes, scale, strict=True):
        by_group = one.view(*own.shape, -1).sum(dim=2, dtype=torch.int32)
        out.copy_((by_group.double() * own.double()).sum(dim=1))
    return sums
