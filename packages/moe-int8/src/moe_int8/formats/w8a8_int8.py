"""SGLang's ``quant_method: w8a8_int8``: int8 per channel, activations quantized per token.

Per expert and projection ``weight`` int8 [N, K] and ``weight_scale`` [N, 1], usually float32. ``is_dynamic`` only
matters on Ascend devices: SGLang's GPU kernels always use one scale per token. Static activation scales, which Ascend's
tools write, come with offsets and are refused because of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import kInt8DynamicTokenSym
from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat

from moe_int8.formats.int8_layout import Int8Storage


class SglangInt8Format(QuantizedFormat):
    """Reader of SGLang's W8A8 INT8; the module docstring describes the tensors."""

    name = "SGLang W8A8 INT8"
    quant_methods = ("w8a8_int8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Int8Storage | str:
        scheme = QuantEntries(quantization, str(layer.checkpoint.path / "config.json")).text("activation_scheme")
        if scheme not in (None, "dynamic"):
            return f"activation_scheme is {scheme!r}, expected 'dynamic'"
        return Int8Storage(8, kInt8DynamicTokenSym, "one scale per output channel: quant_method w8a8_int8")
