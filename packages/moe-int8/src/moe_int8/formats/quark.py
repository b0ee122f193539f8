"""AMD Quark: int8 weights per channel or per tensor.

Per expert and projection ``weight`` int8 [N, K] and ``weight_scale``: [N] (``per_channel``) or one value
(``per_tensor``). ``input_tensors``: null means 16-bit activations. Static per-tensor activations have an
``input_scale`` and, if asymmetric, an ``input_zero_point``. Dynamic ones are per tensor or per token (Quark calls it
``per_channel`` or ``per_token``). Quark also writes zero points for symmetric types, where they are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import (
    QuantKey,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.api.formats import LayerExperts, QuantizedFormat, QuarkArgs, quark_layer

from moe_int8.formats.int8_layout import Int8Storage


class QuarkInt8Format(QuantizedFormat):
    """Reader of Quark INT8; the module docstring describes the tensors."""

    name = "Quark INT8"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Int8Storage | str:
        chosen = quark_layer(quantization, layer)
        if isinstance(chosen, str):
            return chosen
        weight, inputs = chosen.weight, chosen.inputs
        if weight.dtype != "int8":
            return f"{weight.where}: dtype is {weight.dtype!r}, expected 'int8'"
        if weight.dynamic or not weight.symmetric:
            return f"{weight.where} is {'dynamic' if weight.dynamic else 'asymmetric'}, expected symmetric and static"
        scheme = weight.scheme
        if scheme not in ("per_channel", "per_tensor"):
            return f"{weight.where}: qscheme is {scheme!r}, expected 'per_channel' or 'per_tensor'"
        if scheme == "per_channel" and weight.axis not in (None, 0, -2):
            return f"{weight.where}: ch_axis is {weight.axis}, expected 0 (output channels)"
        activation = None if inputs is None else _activation(inputs)
        if isinstance(activation, str):
            return activation
        return Int8Storage(8, activation, f"{scheme} weights: {weight.where}", whole=scheme == "per_tensor")


def _activation(inputs: QuarkArgs) -> QuantKey | str:
    """Return the activation key, or the reason why it is not supported."""
    scheme, symmetric = inputs.scheme, inputs.symmetric
    if inputs.dtype != "int8":
        return f"{inputs.where}: dtype is {inputs.dtype!r}, expected 'int8'"
    if not inputs.dynamic:
        if scheme == "per_tensor":
            return kInt8StaticTensorSym if symmetric else kInt8StaticTensorAsym
        return f"{inputs.where}: static activations have qscheme {scheme!r}, expected 'per_tensor'"
    if scheme in ("per_channel", "per_token"):
        return kInt8DynamicTokenSym if symmetric else kInt8DynamicTokenAsym
    if scheme == "per_tensor" and symmetric:
        return kInt8DynamicTensorSym
    kind = "" if symmetric else "asymmetric "
    return (
        f"{inputs.where}: {kind}qscheme is {scheme!r}, expected 'per_tensor' (symmetric), 'per_channel' or 'per_token'"
    )
