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

from dataclasses import dataclass
from enum import Enum

import torch
from moe_core.api.formats import FLOATS, Matrix, TensorRule
from torch import Tensor

from moe_wna16.formats.codes import bytes_of, fields
from moe_wna16.formats.packing import Packing, g_idx, group_count, transposed


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

    def rules(self, group: int) -> tuple[TensorRule, ...]:
        words, per_word = (torch.int32,), 32 // self.bits
        return (
            TensorRule(
                "qweight",
                lambda m: [(m.cols // per_word, m.rows)],
                words,
                "weight",
                values=None,
                # a word holds consecutive columns of one row, so its bytes are already canonical
                arrange=lambda stored, m: bytes_of(stored.mT),
                multiple=(per_word, per_word),
            ),
            TensorRule("scales", lambda m: [(group_count(m.cols, group), m.rows)], FLOATS, "scale", arrange=transposed),
            TensorRule(
                "qzeros",
                lambda m: [(group_count(m.cols, group), m.rows // per_word)],
                words,
                "zero_point",
                values=None,
                arrange=self._zeros,
            ),
            g_idx("g_idx"),
        )

    def _zeros(self, stored: Tensor, matrix: Matrix) -> Tensor:
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
