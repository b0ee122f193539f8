"""``quant_method: fp8`` of a model whose experts are MXFP4 all the same: DeepSeek-V4, MiMo.

Per expert and projection, beside attention in FP8 blocks:

===========  ==============================  ================================  ===============================
written by   what says so                    codes                             scales, e8m0 [N, K/32]
===========  ==============================  ================================  ===============================
DeepSeek-V4  ``expert_dtype: fp4``           ``weight`` int8 [N, K/2]          ``scale`` or ``weight_scale_inv``
MiMo         ``store_dtype: mxfp4``          ``weight`` uint8 [N, K/2]         ``weight_scale``
===========  ==============================  ================================  ===============================

``expert_dtype`` stands among the settings or at config.json's top level, and stays "fp4" where ModelOpt has made NVFP4
of the experts (``moe_quant_algo``), whose second scale MXFP4 has not.  Activations are in 16 bits, unless quantised
ones are asked for; DeepSeek's own code quantises them to FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage

#: entry: the value that means MXFP4
_MEANS = {"expert_dtype": "fp4", "store_dtype": "mxfp4"}


class Fp8MethodMxfp4Format(QuantizedFormat):
    """See the module docstring."""

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
