"""Groups of columns that share a scale, in canonical codes: uint8 [E, rows, ceil(K / 2)], even columns low."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: columns that share a scale
GROUP = 32
#: all bits of eight bytes' codes but their signs
_MAGNITUDES = 0x7777777777777777
#: bytes of codes that are looked at together
_STEP_BYTES = 128 << 20


def counting_groups(codes: Tensor, columns: int) -> Tensor:
    """bool [E, rows, groups]: which groups have numbers other than zero; to the others quantisers give any scale."""
    experts, rows, width = codes.shape
    groups = -(-columns // GROUP)
    out = torch.empty(experts, rows, groups, dtype=torch.bool, device=codes.device)
    # some experts at a time: what is made of them takes half as much memory as they
    step = max(1, _STEP_BYTES // max(1, rows * width))
    for at in range(0, experts, step):
        some = codes[at : at + step]
        whole = F.pad(some, (0, groups * GROUP // 2 - width)) if width % (GROUP // 2) else some.contiguous()
        if whole.storage_offset() % 8:
            whole = whole.clone()
        first, second = whole.view(torch.int64).view(len(some), rows, groups, 2).unbind(3)
        torch.ne((first | second).bitwise_and_(_MAGNITUDES), 0, out=out[at : at + step])
    return out


def without_groups(codes: Tensor, kept: Tensor) -> Tensor:
    """``codes`` with zeros in the groups that are not ``kept`` (bool [E, rows, groups]); a copy."""
    out = torch.empty_like(codes)
    for target, one, keep in zip(out, codes, kept, strict=True):
        mask = keep.repeat_interleave(GROUP // 2, dim=1)[:, : one.shape[1]]
        torch.mul(one, mask, out=target)
    return out
