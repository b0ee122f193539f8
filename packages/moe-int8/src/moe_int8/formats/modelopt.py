"""NVIDIA ModelOpt: W8A8_SQ_PER_CHANNEL and W8A16 (any letter case).

Per expert and projection ``weight`` int8 [N, K] and ``weight_scale`` float32 [N]; for W8A8_SQ_PER_CHANNEL also
``input_scale`` [], the static scale of all activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import kInt8StaticTensorSym
from moe_core.api.formats import LayerExperts, QuantizedFormat, quant_algo, unknown_algo

from moe_int8.formats.int8_layout import Int8Storage

_ACTIVATIONS = {"W8A8_SQ_PER_CHANNEL": kInt8StaticTensorSym, "W8A16": None}


class ModelOptInt8Format(QuantizedFormat):
    """Reader of ModelOpt INT8; the module docstring describes the tensors."""

    name = "ModelOpt INT8"
    quant_methods = ("modelopt",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Int8Storage | str:
        algorithm, _ = quant_algo(quantization, layer)
        if algorithm not in _ACTIVATIONS:
            return unknown_algo(algorithm, _ACTIVATIONS)
        return Int8Storage(8, _ACTIVATIONS[algorithm], f"one scale per output channel: quant_algo {algorithm}")
