"""Products of int8 codes, accumulated exactly in int32, in plain torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

#: columns whose products float32 sums exactly: 2**10 * 128 * 128 = 2**24
_EXACT_IN_FLOAT = 1024
#: activation rows up to which several groups are multiplied in one call, and maximum rows of such a call
_FEW_ROWS, _CALL_ROWS = 8, 32


def exact_product(x: Tensor, w: Tensor) -> Tensor:
    """Multiply int8 codes exactly: ``x`` times ``w`` transposed, for K < 2**17.

    On a CPU whose int8 instructions are exact (VNNI or similar) this is one call, which reads the codes directly.
    Otherwise float32 GEMMs are used, over as many columns as float32 sums exactly.

    Args:
        x: int8 [R, K].
        w: int8 [rows, K].

    Returns:
        int32 [R, rows].
    """
    if x.device.type == "cpu" and _int_mm_is_exact():
        return torch._int_mm(x, w.mT)
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], _EXACT_IN_FLOAT):
        columns = slice(start, start + _EXACT_IN_FLOAT)
        total += F.linear(x[:, columns].float(), w[:, columns].float()).to(torch.int32)
    return total


def scaled_product(
    x: Tensor, w: Tensor, scale: Tensor, *, zero_point: Tensor | None = None, code_sums: Tensor | None = None
) -> Tensor:
    """Sum the codes of each group exactly, scale each group's sum and add them up.

    Args:
        x: int8 [R, K].
        w: int8 [rows, K].
        scale: float32 [rows, G].
        zero_point: int32 [R, 1], zero points of ``x``.
        code_sums: int32 [rows, G], sums of ``w`` over each group; needed with ``zero_point``.

    Returns:
        float32 [R, rows].
    """
    groups = scale.shape[1]
    size = w.shape[1] // groups
    together = _together(len(x), groups)
    spread = None if together == 1 else _spread(x, groups, together)
    result = torch.zeros(len(x), len(w), dtype=torch.float32, device=x.device)
    for first in range(0, groups, together):
        columns, block = slice(first * size, (first + together) * size), slice(first, first + together)
        rows = x[:, columns] if spread is None else spread[first // together]
        sums = exact_product(rows, w[:, columns]).view(together, len(x), len(w))
        if zero_point is not None and code_sums is not None:
            sums -= zero_point * code_sums[:, block].T[:, None]
        if together == 1:
            result.addcmul_(sums[0].float(), scale[:, first])
        else:
            result += (sums * scale[:, block].T[:, None]).sum(dim=0)
    return result


def _together(rows: int, groups: int) -> int:
    """Return the groups per call: with few rows, calls cost more than multiplying zeros."""
    count = 1
    while rows <= _FEW_ROWS and groups % (2 * count) == 0 and 2 * count * rows <= _CALL_ROWS:
        count *= 2
    return count


def _spread(x: Tensor, groups: int, together: int) -> Tensor:
    """Spread ``x`` [R, K] so that each copy of the rows holds one group's columns.

    The result is [groups / together, together * R, columns].
    """
    rows, size = len(x), x.shape[1] // groups
    blocks = groups // together
    spread = torch.zeros(blocks, together, rows, together, size, dtype=x.dtype, device=x.device)
    spread.diagonal(dim1=1, dim2=3).copy_(x.reshape(rows, blocks, together, size).permute(1, 0, 3, 2))
    return spread.view(blocks, together * rows, together * size)


@functools.cache
def _int_mm_is_exact() -> bool:
    """Return whether the CPU's int8 GEMM is exact.

    Instructions older than VNNI add pairs of products in saturating int16.
    """
    for code, other in ((-128, -128), (127, -128), (127, 127)):
        for rows in (1, 16):
            x = torch.full((rows, 64), code, dtype=torch.int8, device="cpu")
            w = torch.full((16, 64), other, dtype=torch.int8, device="cpu")
            if not bool((torch._int_mm(x, w.mT) == 64 * code * other).all()):
                return False
    return True
