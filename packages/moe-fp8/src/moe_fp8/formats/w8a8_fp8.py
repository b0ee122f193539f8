"""SGLang's ``quant_method: w8a8_fp8``: e4m3 per channel, activations quantized per token.

Per expert and projection ``weight`` e4m3 [N, K] and ``weight_scale`` [N, 1], usually float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import PER_CHANNEL, kFp8DynamicTokenSym
from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat

from moe_fp8.formats.fp8_layout import Fp8Storage


class SglangFp8Format(QuantizedFormat):
    """Reader of SGLang's W8A8 FP8; the module docstring describes the tensors."""

    name = "SGLang W8A8 FP8"
    quant_methods = ("w8a8_fp8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        scheme = QuantEntries(quantization, str(layer.checkpoint.path / "config.json")).text("activation_scheme")
        if scheme not in (None, "dynamic"):
            return f"activation_scheme is {scheme!r}, expected 'dynamic'"
        return Fp8Storage(PER_CHANNEL, kFp8DynamicTokenSym, "one scale per output channel: quant_method w8a8_fp8")
