"""Tensors whose rows are output channels, as compressed-tensors and ModelOpt store them.

========================  ======  ========================  =====================================================
format                    dtype   shape                     codes
========================  ======  ========================  =====================================================
pack-quantized            int32   [N, ceil(K * bits / 32)]  plus 2**(bits-1), the lowest bits first
int-quantized             int8    [N, K]                    signed, one in a byte
int4-quantized            int8    [N, K / 2]                signed, two columns in a byte, the even one low
ModelOpt's W4A16_AWQ      uint8   [N / 2, K]                signed, two output channels in a byte, the even one low
========================  ======  ========================  =====================================================

Scales are [N, groups]. compressed-tensors' zero points are int32 [ceil(N * bits / 32), groups], packed along N (not K),
with 2**(bits-1) added as for the codes. Some versions, and the unpacked formats, store signed int8 [N, groups].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from moe_core.api.formats import FLOATS, Matrix, TensorRule, Values, as_float32
from torch import Tensor

from moe_wna16.formats.codes import fields, packed, rows_of_words
from moe_wna16.formats.packing import Packing, by_rows, g_idx, group_count, rows_first


@dataclass(frozen=True)
class CompressedTensorsPacking(Packing):
    """Packing of compressed-tensors; its variants differ in dtypes and names.

    Gemma 4 stores all experts in one tensor: ``experts.gate_up_proj_packed`` and ``_scale``.
    """

    unset_g_idx = True

    def rules(self, group: int) -> tuple[TensorRule, ...]:
        bits, half = self.bits, 1 << (self.bits - 1)
        in_pairs = TensorRule(
            "weight_packed",
            lambda m: [(m.rows, m.cols // 2)],
            (torch.int8, torch.uint8),
            "weight",
            values=None,
            arrange=lambda stored, m: stored.contiguous().view(torch.uint8) ^ 0x88,
            multiple=(1, 2),
        )
        return (
            TensorRule(
                ("weight_packed", "packed"),
                lambda m: [(m.rows, -(-m.cols * bits // 32))],
                (torch.int32,),
                "weight",
                values=None,
                arrange=lambda stored, m: rows_of_words(stored, bits, m.cols),
            ),
            *([in_pairs] if bits == 4 else []),
            TensorRule(
                "weight",
                lambda m: [(m.rows, m.cols)],
                (torch.int8,),
                "weight",
                values=Values.INT4 if bits == 4 else None,
                arrange=self._bytes,
            ),
            TensorRule(("weight_scale", "scale"), by_rows(group), FLOATS, "scale", arrange=rows_first),
            TensorRule(
                "weight_zero_point",
                lambda m: [(-(-m.rows * bits // 32), group_count(m.cols, group))],
                (torch.int32,),
                "zero_point",
                values=None,
                arrange=lambda stored, m: fields(stored.mT, bits)[..., : m.rows].mT,
            ),
            TensorRule(
                "weight_zero_point",
                by_rows(group),
                (torch.int8,),
                "zero_point",
                values=None,
                arrange=lambda stored, m: (rows_first(stored, m).to(torch.int16) + half).to(torch.uint8),
            ),
            g_idx("weight_g_idx"),
        )

    def _bytes(self, stored: Tensor, matrix: Matrix) -> Tensor:
        # adding the offset flips the sign bit
        raw = stored.view(torch.uint8)
        return raw ^ 0x80 if self.bits == 8 else packed((raw & 15) ^ 8, 4)


@dataclass(frozen=True)
class ModelOptPacking(Packing):
    """Packing of ModelOpt's W4A16_AWQ."""

    def rules(self, group: int) -> tuple[TensorRule, ...]:
        return (
            TensorRule(
                "weight",
                lambda m: [(m.rows // 2, m.cols)],
                (torch.uint8,),
                "weight",
                values=None,
                arrange=_row_pairs,
                multiple=(2, 1),
            ),
            TensorRule(
                "weight_scale",
                lambda m: [(m.rows, group_count(m.cols, group))],
                FLOATS,
                "scale",
                arrange=rows_first,
            ),
            TensorRule(
                "pre_quant_scale",
                lambda m: [(m.cols,)],
                FLOATS,
                "pre_scale",
                required=False,
                arrange=as_float32,
                by_rows=False,
            ),
        )


def _row_pairs(stored: Tensor, matrix: Matrix) -> Tensor:
    signed = stored ^ 0x88
    return torch.stack((packed(signed & 15, 4), packed(signed >> 4, 4)), dim=2).flatten(1, 2)
