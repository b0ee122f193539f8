"""NVIDIA ModelOpt: W4A16_AWQ (any letter case).

Per expert and projection ``weight`` uint8 [N / 2, K], two output channels per byte, ``weight_scale`` float32
[N, ceil(K / group_size)] and, unless smoothing was folded into the previous layer, ``pre_quant_scale`` [K], which
multiplies the inputs. W4A8_AWQ, which also quantizes the inputs, is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat, quant_algo, unknown_algo

from moe_wna16.formats.row_packing import ModelOptPacking
from moe_wna16.formats.wna16_layout import WNA16Storage


class ModelOptAwqFormat(QuantizedFormat):
    """Reader of ModelOpt AWQ; the module docstring describes the tensors."""

    name = "ModelOpt AWQ"
    quant_methods = ("modelopt",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        algorithm, entries = quant_algo(quantization, layer)
        if algorithm != "W4A16_AWQ":
            return unknown_algo(algorithm, ["W4A16_AWQ"])
        if entries.boolean("has_zero_point"):
            return f"{entries.where}: has_zero_point is true, expected false"
        size = entries.integer("group_size", 128) or 128
        return WNA16Storage(ModelOptPacking(4), size, True, f"int4 in groups of {size}: quant_algo {algorithm}")
