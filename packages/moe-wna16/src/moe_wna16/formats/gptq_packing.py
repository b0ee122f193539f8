"""GPTQ's tensors, written by AutoGPTQ, GPTQModel and AutoRound.

==========  ========  ===================  =====================================================================
``qweight`` int32     [K * bits / 32, N]   codes of 32 / bits columns in a word, the lowest bits first
``qzeros``  int32     [groups, N * bits / 32]  zero points of 32 / bits rows in a word, the lowest bits first
``scales``  float     [groups, N]
``g_idx``   int32     [K]                  the group of each column; AutoRound writes none
==========  ========  ===================  =====================================================================

For gpt-oss, GPTQModel (until 2026) stores gate and up as one linear module per expert, ``experts.gate_up.<e>``, next to
``experts.down.<e>``. Its rows follow the model: row 2i is gate i, row 2i + 1 is up i, also in the ``bias`` [2N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from moe_wna16.formats.codes import bytes_of, fields
from moe_wna16.formats.packing import Packing, Shape


class ZeroPoints(Enum):
    """Encodings of zero points in ``qzeros``.

    - ``AS_IT_IS``: the fields are the zero points (version 2; AutoRound's own packing).
    - ``MINUS_ONE``: the fields are one less (version 1), each modulo the field size: 15 stands for 16.
    - ``WORDS_MINUS_ONE``: version 1 as GPTQModel converts it from and to version 2, by subtracting a one in every field
      from the whole *word*. A zero point of 0 borrows from the field above, which adding to the word restores.
    """

    AS_IT_IS = "as it is"
    MINUS_ONE = "minus one"
    WORDS_MINUS_ONE = "words minus one"


@dataclass(frozen=True)
class GptqPacking(Packing):
    """Packing of GPTQ; the module docstring describes the tensors."""

    zero_points: ZeroPoints

    weight = "qweight"
    scale = "scales"
    zero = "qzeros"
    g_idx = "g_idx"

    @property
    def per_word(self) -> int:
        """Codes per word."""
        return 32 // self.bits

    def unfit(self, rows: int, cols: int) -> str | None:
        for size, what in ((cols, "columns"), (rows, "rows")):
            if size % self.per_word:
                return f"{size} {what} are no multiple of {self.per_word}, the {self.bits}-bit fields of a word"
        return None

    def weight_shape(self, rows: int, cols: int) -> Shape:
        return (cols // self.per_word, rows)

    def codes(self, stored: Tensor, cols: int) -> Tensor:
        # a word holds consecutive columns of one row, so its bytes are already canonical
        return bytes_of(stored.mT)

    def scale_shapes(self, rows: int, groups: int) -> Sequence[Shape]:
        return [(groups, rows)]

    def scales(self, stored: Tensor, rows: int) -> Tensor:
        return stored.mT

    def zero_shapes(self, rows: int, groups: int, dtype: torch.dtype | None) -> Sequence[Shape]:
        return [(groups, rows // self.per_word)]

    def zeros(self, stored: Tensor, rows: int) -> Tensor:
        if self.zero_points is ZeroPoints.WORDS_MINUS_ONE:
            ones = sum(1 << at for at in range(0, 32, self.bits))
            stored = (stored.long() + ones).to(torch.int32)
        found = fields(stored, self.bits)
        if self.zero_points is ZeroPoints.MINUS_ONE:
            # 255 + 1 overflows uint8
            found = (found.int() if self.bits == 8 else found) + 1
        return found.mT

    def other_version(self, zeros: Tensor) -> str | None:
        shift = -1 if self.zero_points is ZeroPoints.AS_IT_IS else 1
        if bool((zeros == (1 << (self.bits - 1)) + shift).all()):
            named, found = ("2", "1") if shift < 0 else ("1", "2")
            return f"are those of version {found} of the format, which config.json calls version {named}"
        return None
