"""AMD Quark: ``fp4`` weights in groups of 32 with e8m0 scales (OCP MXFP4).

Per expert and projection ``weight`` uint8 [N, K/2], two codes per byte, the even column low, and ``weight_scale`` uint8
[N, K/32]. gpt-oss experts store gate and up in one ``gate_up_proj`` with interleaved rows, and have a ``bias``.

``input_tensors``: null means 16-bit activations. ``fp4`` and ``fp8_e4m3`` in groups of 32 with e8m0 scales are dynamic
MXFP4 and MXFP8, with scales rounded according to ``scale_calculation_mode``. Otherwise ``fp8_e4m3`` is static per
tensor (``input_scale``), dynamic per token (Quark calls it ``per_channel`` or ``per_token``) or in groups of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)
from moe_core.api.formats import LayerExperts, QuantizedFormat, quark_layer

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

_ACTIVATIONS = {
    *(kFp8StaticTensorSym, kFp8DynamicTokenSym, kFp8Dynamic128Sym),
    *(kMxfp4DynamicDown, kMxfp4DynamicEven, kMxfp8DynamicDown, kMxfp8DynamicEven),
}
_EXPECTED = (
    f"fp4 or fp8_e4m3 per_group of {GROUP} with e8m0 scales, or fp8_e4m3 static per_tensor, dynamic per_token or in "
    "groups of 128"
)


class QuarkMxfp4Format(QuantizedFormat):
    """Reader of Quark MXFP4; the module docstring describes the tensors."""

    name = "Quark MXFP4"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        chosen = quark_layer(quantization, layer)
        if isinstance(chosen, str):
            return chosen
        weight = chosen.weight
        if weight.dtype != "fp4":
            return f"{weight.where}: dtype is {weight.dtype!r}, expected 'fp4'"
        if not weight.is_microscaling:
            return f"{weight.where} is {weight}, expected per_group of {GROUP} with e8m0 scales"
        if weight.dynamic:
            return f"{weight.where} is dynamic, expected static"
        # e8m0 scales of larger groups are none of these keys
        rounded = chosen.inputs is not None and chosen.inputs.exponents
        supported = _ACTIVATIONS - {kFp8Dynamic128Sym} if rounded else _ACTIVATIONS
        activation = chosen.activation(supported.__contains__, _EXPECTED)
        if isinstance(activation, str):
            return activation
        return Mxfp4Storage(activation, f"{weight} weights: {weight.where}")
