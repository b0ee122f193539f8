"""Weights and scales in the layout of Humming's kernels, for 16-bit activations.

A weight block is 64 rows (n) by 16 columns (k), one tensor-core step. Blocks are ordered along the rows first, then
along the columns. Within a block, the codes are ordered by the warp's thread t that multiplies them: rows 16 i + 8 j +
t / 4 and columns 8 h + 2 (t mod 4) + l, in words

    int4  word i: j, h, l from its lowest bits in the order l, j, h (h fastest)
    int8  word 2 i + j: in the order l, h (h fastest)

so that one mask extracts every second code: two adjacent numbers with the same l.

Scales and zero points follow the rows. Group scales are transposed in 8 x 8 tiles; row scales keep pairs together. Each
thread's values are then contiguous. Zero points are stored in the hidden states' dtype, since an int4 zero point may be
16, which four bits cannot represent.

Humming's own functions do the same, but only on a GPU, with a kernel that must be compiled first. On GPUs the layouts
are compared with their results.
"""

from __future__ import annotations

import torch
from moe_core import TensorError
from moe_core.api.libraries import by_experts
from torch import Tensor

#: rows and columns of a block
ROWS, COLUMNS = 64, 16


def packed_int4(w: Tensor) -> Tensor:
    """Pack int4 codes.

    Args:
        w: uint8 [E, N, K / 2], two codes per byte, the even column low.

    Returns:
        int32 [E, K / 16, 2 N].
    """
    experts, rows, cols = w.shape[0], w.shape[1], 2 * w.shape[2]
    _check(w, rows, cols)

    def step(given: Tensor, target: Tensor) -> None:
        count = given.shape[0]
        # expert, block of rows, i, j, t / 4, block of columns, h, t mod 4; l in a byte
        pairs = given.contiguous().view(count, rows // ROWS, 4, 2, 8, cols // COLUMNS, 2, 4)
        even, odd = pairs.unbind(6)
        both = torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), dim=-1)
        ordered = both.permute(0, 5, 1, 4, 6, 2, 7, 3)  # …, t / 4, t mod 4, i, l, j
        target.view(torch.uint8).view(ordered.shape).copy_(ordered)

    out = torch.empty(experts, cols // COLUMNS, 2 * rows, dtype=torch.int32, device=w.device)
    return by_experts(step, w, out)


def packed_bytes(w: Tensor, *, distances: bool) -> Tensor:
    """Pack int8 codes.

    Args:
        w: uint8 [E, N, K].
        distances: encode for bfloat16 kernels, 128 + d as d and 127 - d as 128 + d.

    Returns:
        int32 [E, K / 16, 4 N].
    """
    experts, rows, cols = w.shape
    _check(w, rows, cols)

    def step(given: Tensor, target: Tensor) -> None:
        if distances:
            given = given ^ torch.where(given < 128, 255, 128).to(torch.uint8)
        # expert, block of rows, i, j, t / 4, block of columns, h, t mod 4, l
        codes = given.contiguous().view(given.shape[0], rows // ROWS, 4, 2, 8, cols // COLUMNS, 2, 4, 2)
        ordered = codes.permute(0, 5, 1, 4, 7, 2, 3, 8, 6)  # …, t / 4, t mod 4, i, j, l, h
        target.view(torch.uint8).view(ordered.shape).copy_(ordered)

    out = torch.empty(experts, cols // COLUMNS, 4 * rows, dtype=torch.int32, device=w.device)
    return by_experts(step, w, out)


def ordered_scales(scale: Tensor, *, whole_rows: bool) -> Tensor:
    """Reorder scales or zero points.

    Args:
        scale: [E, N, G].
        whole_rows: one scale per row, applied to the products; never for zero points.

    Returns:
        [E, G, N].
    """
    experts, rows, groups = scale.shape
    if rows % ROWS:
        raise TensorError(f"the scales are of {rows} rows, expected a multiple of {ROWS}")
    if whole_rows:
        ordered = scale.transpose(1, 2).reshape(experts, groups, rows // 32, 4, 4, 2).transpose(3, 4)
    else:
        ordered = scale.transpose(1, 2).reshape(experts, groups, rows // 64, 8, 8).transpose(3, 4)
    return ordered.reshape(experts, groups, rows)


def _check(w: Tensor, rows: int, cols: int) -> None:
    if rows % ROWS or cols % (2 * COLUMNS):
        raise TensorError(
            f"w holds {rows} x {cols} codes per expert, expected multiples of {ROWS} rows and {2 * COLUMNS} columns"
        )
