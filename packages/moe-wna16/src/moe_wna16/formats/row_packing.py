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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_wna16.formats.codes import fields, packed, rows_of_words
from moe_wna16.formats.packing import Packing, Shape


@dataclass(frozen=True)
class _CompressedTensors(Packing):
    scale = "weight_scale"
    zero: ClassVar[str | None] = "weight_zero_point"
    g_idx: ClassVar[str | None] = "weight_g_idx"
    unset_g_idx = True
    zero_dtypes = (torch.int32, torch.int8)

    def scale_shapes(self, rows: int, groups: int) -> Sequence[Shape]:
        return [(rows, groups), (rows,)] if groups == 1 else [(rows, groups)]

    def zero_shapes(self, rows: int, groups: int, dtype: torch.dtype | None) -> Sequence[Shape]:
        if dtype is torch.int32:
            return [(-(-rows * self.bits // 32), groups)]
        return self.scale_shapes(rows, groups)

    def zeros(self, stored: Tensor, rows: int) -> Tensor:
        if stored.dtype is torch.int32:
            return fields(stored.mT, self.bits)[..., :rows].mT
        half = 1 << (self.bits - 1)
        return (stored.reshape(len(stored), rows, -1).to(torch.int16) + half).to(torch.uint8)


@dataclass(frozen=True)
class PackQuantized(_CompressedTensors):
    """Packing of ``pack-quantized``."""

    weight = "weight_packed"

    def weight_shape(self, rows: int, cols: int) -> Shape:
        return (rows, -(-cols * self.bits // 32))

    def codes(self, stored: Tensor, cols: int) -> Tensor:
        return rows_of_words(stored, self.bits, cols)


@dataclass(frozen=True)
class StackedPackQuantized(PackQuantized):
    """Packing of ``pack-quantized`` with all experts in one tensor.

    Gemma 4 uses it: ``experts.gate_up_proj_packed`` and ``_scale``. How it would store zero points and column groups is
    unknown.
    """

    joint = "_"
    weight = "packed"
    scale = "scale"
    zero = None
    g_idx = None


@dataclass(frozen=True)
class IntQuantized(_CompressedTensors):
    """Packing of ``int-quantized``."""

    weight = "weight"
    weight_dtypes = (torch.int8,)

    def weight_shape(self, rows: int, cols: int) -> Shape:
        return (rows, cols)

    def codes(self, stored: Tensor, cols: int) -> Tensor:
        # adding the offset flips the sign bit
        raw = stored.view(torch.uint8)
        return raw ^ 0x80 if self.bits == 8 else packed((raw & 15) ^ 8, 4)

    def refused_codes(self, stored: Tensor) -> Tensor | None:
        return (stored < -8) | (stored > 7) if self.bits == 4 else None


@dataclass(frozen=True)
class Int4Quantized(_CompressedTensors):
    """Packing of ``int4-quantized``."""

    weight = "weight_packed"
    weight_dtypes = (torch.int8, torch.uint8)

    def unfit(self, rows: int, cols: int) -> str | None:
        return f"{cols} columns are odd, and two share a byte" if cols % 2 else None

    def weight_shape(self, rows: int, cols: int) -> Shape:
        return (rows, cols // 2)

    def codes(self, stored: Tensor, cols: int) -> Tensor:
        return stored.contiguous().view(torch.uint8) ^ 0x88


@dataclass(frozen=True)
class ModelOptPacking(Packing):
    """Packing of ModelOpt's W4A16_AWQ."""

    weight = "weight"
    scale = "weight_scale"
    pre_scale = "pre_quant_scale"
    weight_dtypes = (torch.uint8,)

    def unfit(self, rows: int, cols: int) -> str | None:
        return f"{rows} rows are odd, and two share a byte" if rows % 2 else None

    def weight_shape(self, rows: int, cols: int) -> Shape:
        return (rows // 2, cols)

    def codes(self, stored: Tensor, cols: int) -> Tensor:
        signed = stored ^ 0x88
        return torch.stack((packed(signed & 15, 4), packed(signed >> 4, 4)), dim=2).flatten(1, 2)
