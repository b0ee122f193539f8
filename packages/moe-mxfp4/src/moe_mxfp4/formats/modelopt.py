"""NVIDIA ModelOpt: MXFP4, W4A8_MXFP4_FP8 and their variants (any letter case).

Per expert and projection ``weight`` uint8 [N, K/2], two codes per byte, the even column low, and ``weight_scale`` uint8
[N, K/32], e8m0.

==========================  =========================================================
``quant_algo``              activations
==========================  =========================================================
MXFP4                       MXFP4, scales rounded up
W4A8_MXFP4_FP8              e4m3, one static scale per tensor (``input_scale`` []),
                            without ``input_scale`` one per token
W4A8_MXFP4_MXFP8            MXFP8
W4A16_MXFP4                 16 bits
==========================  =========================================================

ModelOpt writes the first two; the other names are TensorRT-LLM's. ModelOpt writes "mxfp4" for two presets:
``MXFP4_DEFAULT_CFG``, which quantizes inputs like weights, and ``MXFP4_MLP_WEIGHT_ONLY_CFG``, which does not. The files
do not distinguish them, so the default preset is assumed. ``W4A8_MXFP4_FP8_CFG`` has no calibration, so its files have
no ``input_scale``. ModelOpt then computes the scale of each call's inputs, TensorRT-LLM that of all tokens. The scale
per token used here is finer than both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import QuantKey, kFp8DynamicTokenSym, kFp8StaticTensorSym, kMxfp4Dynamic, kMxfp8Dynamic
from moe_core.api.formats import INPUT_SCALES, LayerExperts, QuantizedFormat, one_suffix, quant_algo, unknown_algo

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

_ALGORITHMS: dict[str, QuantKey | None] = {
    "MXFP4": kMxfp4Dynamic,
    "W4A8_MXFP4_FP8": kFp8StaticTensorSym,
    "W4A8_MXFP4_MXFP8": kMxfp8Dynamic,
    "W4A16_MXFP4": None,
}


class ModelOptMxfp4Format(QuantizedFormat):
    """Reader of ModelOpt MXFP4; the module docstring describes the tensors."""

    name = "ModelOpt MXFP4"
    quant_methods = ("modelopt",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        algorithm, entries = quant_algo(quantization, layer)
        if algorithm not in _ALGORITHMS:
            return unknown_algo(algorithm, _ALGORITHMS)
        size = entries.integer("group_size", GROUP, least=0)
        if size not in (0, GROUP):
            return f"group_size is {size} for {algorithm}, expected {GROUP}"
        activation = _ALGORITHMS[algorithm]
        if activation == kFp8StaticTensorSym and not any(one_suffix(layer, p, INPUT_SCALES) for p in layer.projections):
            activation = kFp8DynamicTokenSym
        return Mxfp4Storage(activation, f"MXFP4 weights: quant_algo {algorithm}")
