"""Products of int8 codes, summed in int32 without rounding, in plain torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

#: columns whose products float32 sums exactly: 2**10 * 128 * 128 = 2**24
_EXACT_IN_FLOAT = 1024


def exact_product(x: Tensor, w: Tensor) -> Tensor:
    """``x`` [R, K] times ``w`` [rows, K] transposed: int32 [R, rows], exact for K < 2**17.

    On a CPU one call of its int8 instructions where those are exact (VNNI, and like it), which reads the codes as they
    are; elsewhere float32 products of as many columns as float32 sums exactly.
    """
    if x.device.type == "cpu" and _int_mm_is_exact():
        return torch._int_mm(x, w.mT)
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], _EXACT_IN_FLOAT):
        columns = slice(start, start + _EXACT_IN_FLOAT)
        total += F.linear(x[:, columns].float(), w[:, columns].float()).to(torch.int32)
    return total


@functools.cache
def _int_mm_is_exact() -> bool:
    """Whether the CPU's int8 products are: instructions older than VNNI add pairs of products in saturating int16."""
    for code, other in ((-128, -128), (127, -128), (127, 127)):
        for rows in (1, 16):
            x = torch.full((rows, 64), code, dtype=torch.int8)
            w = torch.full((16, 64), other, dtype=torch.int8)
            if not bool((torch._int_mm(x, w.mT) == 64 * code * other).all()):
                return False
    return True
