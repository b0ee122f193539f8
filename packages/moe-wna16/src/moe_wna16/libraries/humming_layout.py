"""Weights and scales in the order in which Humming's kernels read them, for 16-bit activations.

A block of weights is 64 rows (n) and 16 columns (k): what one step of the tensor core multiplies.  Blocks come in turns
along the rows, then along the columns.  Within a block lie, thread t of a warp after the other, the codes that it
multiplies: those of the rows 16 i + 8 j + t / 4 and the columns 8 h + 2 (t mod 4) + l, in words

    int4  word i: j, h, l from its lowest bits in the order l, j, h (h fastest)
    int8  word 2 i + j: in the order l, h (h fastest)

so that one mask takes every second code: two numbers, side by side, of the same l.

Scales and zero points follow the rows: those of groups with 8 x 8 of them exchanged, scales of whole rows with pairs in
place, so that one thread's lie together.  Zero points are numbers of the hidden states' dtype: four bits would not hold
the 16 that zero points of int4 codes may be.

Humming's own functions do the same on a GPU only, with a kernel that they compile first; layouts are compared with what
those write where there is one.
"""

from __future__ import annotations

import torch
from moe_core import TensorError
from moe_core.api.libraries import by_experts
from torch import Tensor

#: rows and columns of a block
ROWS, COLUMNS = 64, 16


def packed_int4(w: Tensor) -> Tensor:
    """``w`` [E, N, K / 2] uint8, two codes in a byte, the even column low: [E, K / 16, 2 N] int32."""
    experts, rows, cols = w.shape[0], w.shape[1], 2 * w.shape[2]
    _check(w, rows, cols)

    def step(given: Tensor, target: Tensor) -> None:
        count = given.shape[0]
        #     expert, block of rows, i, j, t / 4, block of columns, h, t mod 4; l in a byte
        pairs = given.contiguous().view(count, rows // ROWS, 4, 2, 8, cols // COLUMNS, 2, 4)
        even, odd = pairs.unbind(6)
        both = torch.stack(((even & 15) | (odd << 4), (even >> 4) | (odd & 240)), dim=-1)
        ordered = both.permute(0, 5, 1, 4, 6, 2, 7, 3)  # …, t / 4, t mod 4, i, l, j
        target.view(torch.uint8).view(ordered.shape).copy_(ordered)

    out = torch.empty(experts, cols // COLUMNS, 2 * rows, dtype=torch.int32, device=w.device)
    return by_experts(step, w, out)


def packed_bytes(w: Tensor, *, distances: bool) -> Tensor:
    """``w`` [E, N, K] uint8, a code in a byte: [E, K / 16, 4 N] int32.

    ``distances``: codes as bfloat16 kernels read them, 128 + d as d and 127 - d as 128 + d.
    """
    experts, rows, cols = w.shape
    _check(w, rows, cols)

    def step(given: Tensor, target: Tensor) -> None:
        if distances:
            given = given ^ torch.where(given < 128, 255, 128).to(torch.uint8)
        #     expert, block of rows, i, j, t / 4, block of columns, h, t mod 4, l
        codes = given.contiguous().view(given.shape[0], rows // ROWS, 4, 2, 8, cols // COLUMNS, 2, 4, 2)
        ordered = codes.permute(0, 5, 1, 4, 7, 2, 3, 8, 6)  # …, t / 4, t mod 4, i, j, l, h
        target.view(torch.uint8).view(ordered.shape).copy_(ordered)

    out = torch.empty(experts, cols // COLUMNS, 4 * rows, dtype=torch.int32, device=w.device)
    return by_experts(step, w, out)


def ordered_scales(scale: Tensor, *, whole_rows: bool) -> Tensor:
    """``scale`` [E, N, G], or zero points, as [E, G, N].

    ``whole_rows``: scales, one for each row, by which products are multiplied; zero points are never.
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
