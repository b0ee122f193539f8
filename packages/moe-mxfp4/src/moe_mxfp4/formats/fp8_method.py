"""MXFP4 experts in models with ``quant_method: fp8``: DeepSeek-V4, MiMo.

Per expert and projection, in models whose attention is block FP8:

===========  ==============================  ================================  ===============================
written by   marked by                       codes                             scales, e8m0 [N, K/32]
===========  ==============================  ================================  ===============================
DeepSeek-V4  ``expert_dtype: fp4``           ``weight`` int8 [N, K/2]          ``scale`` or ``weight_scale_inv``
MiMo         ``store_dtype: mxfp4``          ``weight`` uint8 [N, K/2]         ``weight_scale``
===========  ==============================  ================================  ===============================

``expert_dtype`` is part of the quantization config or at the top level of config.json. It remains "fp4" after
ModelOpt has converted the experts to NVFP4 (``moe_quant_algo``); the second scale of NVFP4, which MXFP4 does not have,
distinguishes them. Activations are 16-bit unless quantized ones are requested; DeepSeek's own code quantizes them to
FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage

#: entry: the value that means MXFP4
_MEANS = {"expert_dtype": "fp4", "store_dtype": "mxfp4"}


class Fp8MethodMxfp4Format(QuantizedFormat):
    """Reader of MXFP4 experts in FP8 models; the module docstring describes the tensors."""

    name = "MXFP4 experts of an FP8 model (DeepSeek-V4, MiMo)"
    quant_methods = ("fp8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        config = layer.checkpoint.config
        stored = {layer.stored_dtype(projection, "weight") for projection in layer.projections}
        if not stored <= {"I8", "U8"}:
            return f"weights are {' and '.join(sorted(stored))}, expected two codes in a byte (I8 or U8)"
        second = next((p for p in sorted(layer.projections) if layer.has(p, "weight_scale_2")), None)
        if second is not None:
            found = layer.name(0, second, "weight_scale_2")
            return f"{found} is there, as NVFP4 has it, expected e8m0 scales alone"
        for name, value in _MEANS.items():
            if str(quantization.get(name, config.get(name))).lower() == value:
                return Mxfp4Storage(None, f"MXFP4 weights: {name} is {value!r}", scale="scale")
        return "neither expert_dtype is 'fp4' nor store_dtype 'mxfp4'"
