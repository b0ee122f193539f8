"""AMD Quark: int8 weights per channel or per tensor.

Per expert and projection ``weight`` int8 [N, K] and ``weight_scale``: [N] (``per_channel``) or one value
(``per_tensor``). ``input_tensors``: null means 16-bit activations. Static per-tensor activations have an
``input_scale`` and, if asymmetric, an ``input_zero_point``. Dynamic ones are per tensor or per token (Quark calls it
``per_channel`` or ``per_token``). Quark also writes zero points for symmetric types, where they are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import kInt8DynamicTokenSym
from moe_core.api.formats import LayerExperts, QuantizedFormat, quark_layer

from moe_int8.formats.int8_layout import Int8Storage

_EXPECTED = "int8 per_tensor (symmetric if dynamic), or dynamic per_channel or per_token"


class QuarkInt8Format(QuantizedFormat):
    """Reader of Quark INT8; the module docstring describes the tensors."""

    name = "Quark INT8"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Int8Storage | str:
        chosen = quark_layer(quantization, layer)
        if isinstance(chosen, str):
            return chosen
        weight = chosen.weight
        if weight.dtype != "int8":
            return f"{weight.where}: dtype is {weight.dtype!r}, expected 'int8'"
        if weight.dynamic or not weight.symmetric:
            return f"{weight.where} is {'dynamic' if weight.dynamic else 'asymmetric'}, expected symmetric and static"
        scheme = weight.scheme
        if scheme not in ("per_channel", "per_tensor"):
            return f"{weight.where}: qscheme is {scheme!r}, expected 'per_channel' or 'per_tensor'"
        if scheme == "per_channel" and weight.axis not in (None, 0, -2):
            return f"{weight.where}: ch_axis is {weight.axis}, expected 0 (output channels)"
        activation = chosen.activation(lambda key: key.dtype == kInt8DynamicTokenSym.dtype, _EXPECTED)
        if isinstance(activation, str):
            return activation
        return Int8Storage(8, activation, f"{scheme} weights: {weight.where}", whole=scheme == "per_tensor")
