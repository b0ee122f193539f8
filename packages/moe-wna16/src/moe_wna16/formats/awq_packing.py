"""AWQ's tensors (``version: gemm``), written by AutoAWQ, GPTQModel and AutoRound.

==========  ========  ================  ==========================================================================
``qweight`` int32     [K, N / 8]        codes of eight rows in a word: field p is row 0, 2, 4, 6, 1, 3, 5, 7 of them
``qzeros``  int32     [groups, N / 8]   zero points in the same order
``scales``  float     [groups, N]
==========  ========  ================  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core.api.formats import FLOATS, Matrix, TensorRule
from torch import Tensor

from moe_wna16.formats.codes import fields
from moe_wna16.formats.packing import Packing, group_count, transposed

#: rows whose codes are in the lower and in the upper fields of a word's bytes
_LOW, _HIGH = [0, 4, 1, 5], [2, 6, 3, 7]
#: mask of the lower fields of a word's bytes
_LOWER = 0x0F0F0F0F
#: field of each of a word's eight rows
_FIELD = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class AwqPacking(Packing):
    """Packing of AWQ, 4 bits; the module docstring describes the tensors."""

    def rules(self, group: int) -> tuple[TensorRule, ...]:
        words = (torch.int32,)
        return (
            TensorRule(
                "qweight",
                lambda m: [(m.cols, m.rows // 8)],
                words,
                "weight",
                values=None,
                arrange=_codes,
                multiple=(8, 1),
            ),
            TensorRule("scales", lambda m: [(group_count(m.cols, group), m.rows)], FLOATS, "scale", arrange=transposed),
            TensorRule(
                "qzeros",
                lambda m: [(group_count(m.cols, group), m.rows // 8)],
                words,
                "zero_point",
                values=None,
                arrange=lambda stored, m: fields(stored, 4).reshape(*stored.shape, 8)[..., _FIELD].flatten(-2).mT,
            ),
        )


def _codes(stored: Tensor, matrix: Matrix) -> Tensor:
    count, words = stored.shape[0], stored.shape[2]
    # The number of columns is even: columns of w13 are rows of w2 and vice versa, and rows are a multiple of 8.
    even, odd = stored[:, 0::2], stored[:, 1::2]
    # combine two columns of the same row in a byte before bytes are permuted
    low = (even & _LOWER) | ((odd & _LOWER) << 4)
    high = ((even >> 4) & _LOWER) | (odd & ~_LOWER)
    out = torch.empty(count, words, 8, even.shape[1], dtype=torch.uint8, device=stored.device)
    for rows, half in ((_LOW, low), (_HIGH, high)):
        bytes_of = half.view(torch.uint8).mT.contiguous().view(count, words, 4, -1)
        for byte, row in enumerate(rows):
            out[:, :, row] = bytes_of[:, :, byte]
    return out.flatten(1, 2)
