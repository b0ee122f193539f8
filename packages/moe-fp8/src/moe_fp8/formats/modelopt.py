"""NVIDIA ModelOpt: FP8, FP8_PER_CHANNEL_PER_TOKEN, block FP8 and MXFP8 (any letter case).

Per expert and projection ``weight`` e4m3 [N, K] and ``weight_scale``:

==========================  ====================================  ===========================================
``quant_algo``              ``weight_scale``                      activations
==========================  ====================================  ===========================================
FP8                         float32 []                            static per tensor: ``input_scale`` []
FP8_PER_CHANNEL_PER_TOKEN   float32 [N]                           dynamic per token
FP8_PB_WO, FP8_PB_REAL      float32 [N/128, 1, K/128, 1]          16 bits
FP8_PB, FP8_BLOCK_SCALES    the same, or [N/128, K/128]           dynamic per token and 128 columns
MXFP8                       uint8 [N, K/32] e8m0                  MXFP8
==========================  ====================================  ===========================================

``FP8_PB_WO`` is "per block, weight only": ModelOpt's preset (``FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG``) disables the input
quantizers, so the activation key is None. vLLM nevertheless quantizes activations in groups of 128 for it, which
differs from what the tool computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    PER_CHANNEL,
    PER_TENSOR,
    GroupShape,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
)
from moe_core.api.formats import LayerExperts, QuantizedFormat, quant_algo, unknown_algo

from moe_fp8.formats.fp8_layout import MX_GROUP, Fp8Storage

#: block FP8 algorithms: whether activations stay 16-bit
_BLOCKS = {"FP8_PB_WO": True, "FP8_PB_REAL": True, "FP8_BLOCK_SCALES": False, "FP8_PB": False}
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", *_BLOCKS, "MXFP8")


class ModelOptFp8Format(QuantizedFormat):
    """Reader of ModelOpt FP8 and MXFP8; the module docstring describes the tensors."""

    name = "ModelOpt FP8 and MXFP8"
    quant_methods = ("modelopt",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        algorithm, entries = quant_algo(quantization, layer)
        if algorithm not in _ALGORITHMS:
            return unknown_algo(algorithm, _ALGORITHMS)
        named = f"quant_algo {algorithm}"
        if algorithm == "FP8":
            return Fp8Storage(PER_TENSOR, kFp8StaticTensorSym, f"one scale per tensor: {named}")
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return Fp8Storage(PER_CHANNEL, kFp8DynamicTokenSym, f"one scale per output channel: {named}")
        if algorithm == "MXFP8":
            size = entries.integer("group_size", 32, least=0)
            if size not in (0, MX_GROUP.col):
                return f"group_size is {size} for MXFP8, expected 32"
            return Fp8Storage(MX_GROUP, kMxfp8Dynamic, f"one e8m0 scale per 32 columns: {named}", microscaling=True)
        size = entries.integer("group_size", 128, least=0) or 128
        activation = None if _BLOCKS[algorithm] else kFp8Dynamic128Sym.with_group(1, size)
        return Fp8Storage(GroupShape(size, size), activation, f"one scale per block of {size}x{size}: {named}")
