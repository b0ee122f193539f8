"""Column groups that share a scale, in canonical codes.

Codes are uint8 [E, rows, ceil(K / 2)], even columns in the low bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

#: columns that share a scale
GROUP = 32
#: bit mask of the magnitudes (everything but the signs) of eight bytes of codes
_MAGNITUDES = 0x7777777777777777
#: bytes of codes processed at a time
_STEP_BYTES = 128 << 20


def counting_groups(codes: Tensor, columns: int) -> Tensor:
    """Return which groups have nonzero values; quantizers assign the others arbitrary scales.

    Args:
        codes: uint8 [E, rows, ceil(columns / 2)].
        columns: number of columns.

    Returns:
        bool [E, rows, groups].
    """
    experts, rows, width = codes.shape
    groups = -(-columns // GROUP)
    out = torch.empty(experts, rows, groups, dtype=torch.bool, device=codes.device)
    # in chunks of experts: the intermediate takes half as much memory as the codes
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
    """Copy ``codes`` with zeros in the groups that are not ``kept``.

    Args:
        codes: uint8 [E, rows, ceil(K / 2)].
        kept: bool [E, rows, groups].

    Returns:
        uint8 of the shape of ``codes``.
    """
    out = torch.empty_like(codes)
    for target, one, keep in zip(out, codes, kept, strict=True):
        mask = keep.repeat_interleave(GROUP // 2, dim=1)[:, : one.shape[1]]
        torch.mul(one, mask, out=target)
    return out
