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

from moe_core import QuantKey, kFp8Dynamic128Sym, kFp8DynamicTokenSym, kFp8StaticTensorSym
from moe_core.api.formats import LayerExperts, QuantizedFormat, QuarkArgs, quark_layer

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP


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
        activation = None if chosen.inputs is None else _activation(chosen.inputs)
        if isinstance(activation, str):
            return activation
        return Mxfp4Storage(activation, f"{weight} weights: {weight.where}")


def _activation(inputs: QuarkArgs) -> QuantKey | str:
    """Return the activation key, or the reason why it is not supported."""
    scheme, dynamic, e4m3 = inputs.scheme, inputs.dynamic, inputs.is_e4m3
    microscaling = inputs.mx_activation
    if microscaling is not None:
        return microscaling
    if e4m3 and not dynamic and scheme == "per_tensor":
        return kFp8StaticTensorSym
    if e4m3 and dynamic and scheme in ("per_channel", "per_token"):
        return kFp8DynamicTokenSym
    if e4m3 and dynamic and scheme == "per_group" and inputs.group_size == 128 and not inputs.exponents:
        return kFp8Dynamic128Sym
    kind = "dynamic" if dynamic else "static"
    return (
        f"{inputs.where} is {kind} {inputs}, expected fp4 or fp8_e4m3 per_group of {GROUP} with e8m0 scales, or "
        "fp8_e4m3 static per_tensor, dynamic per_token or in groups of 128"
    )
