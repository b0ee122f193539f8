"""AMD Quark: fp8_e4m3 weights per tensor, per channel or per block, and MXFP8.

Per expert and projection ``weight`` e4m3 [N, K] and ``weight_scale``: a scalar (``per_tensor``), [N] (``per_channel``),
[ceil(N/bn), ceil(K/bk)] float32 or e8m0 (``per_block``), uint8 [N, K/32] (``per_group`` of 32 with ``scale_format:
e8m0``).  ``input_tensors``: null leaves activations in 16 bits; static per tensor has ``input_scale``; dynamic is per
tensor, per token (which Quark calls ``per_channel`` or ``per_token``), or in groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.checkpoint.quark import quark_layer
from moe_core.quant_key import (
    PER_CHANNEL,
    PER_TENSOR,
    GroupShape,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
)

from moe_fp8.formats.fp8_experts import Fp8Format
from moe_fp8.formats.fp8_layout import MX_GROUP, Fp8Storage

_E4M3 = ("fp8_e4m3", "fp8")


class QuarkFp8Format(Fp8Format):
    """See the module docstring."""

    name = "Quark FP8"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        method = quantization.get("quant_method")
        if method != "quark":
            return f"quant_method is {method!r}, expected 'quark'"
        chosen = quark_layer(quantization, layer)
        weight = chosen.part("weight")
        if weight is None:
            return f"{chosen.where}: weight is null"
        if weight.text("dtype") not in _E4M3:
            return f"{weight.where}: dtype is {weight.text('dtype')!r}, expected 'fp8_e4m3'"
        if weight.boolean("is_dynamic"):
            return f"{weight.where} is dynamic, expected static"
        if chosen.part("output_tensors") is not None:
            return f"{chosen.where}: output_tensors are quantised, expected null"
        mx = _is_microscaling(weight)
        shape = MX_GROUP if mx else _shape(weight)
        if isinstance(shape, str):
            return shape
        inputs = chosen.part("input_tensors")
        activation = None if inputs is None else _activation(inputs)
        if isinstance(activation, str):
            return activation
        why = f"{weight.text('qscheme')} weights: {weight.where}"
        return Fp8Storage(shape, activation, why, microscaling=mx, exponent_bytes=weight.text("scale_format") == "e8m0")


def _is_microscaling(entries: QuantEntries) -> bool:
    grouped = entries.text("qscheme") == "per_group" and entries.integer("group_size") == MX_GROUP.col
    return grouped and entries.text("scale_format") == "e8m0"


def _shape(weight: QuantEntries) -> GroupShape | str:
    scheme = weight.text("qscheme")
    if scheme == "per_tensor":
        return PER_TENSOR
    if scheme == "per_channel":
        return PER_CHANNEL
    if scheme == "per_block":
        return GroupShape(*(weight.block("block_size") or (128, 128)))
    return f"{weight.where}: qscheme is {scheme!r}, expected 'per_tensor', 'per_channel', 'per_block' or MXFP8"


def _activation(inputs: QuantEntries) -> QuantKey | str:
    """The activation key, or why there is none."""
    scheme = inputs.text("qscheme")
    if inputs.text("dtype") not in _E4M3:
        return f"{inputs.where}: dtype is {inputs.text('dtype')!r}, expected 'fp8_e4m3'"
    if not inputs.boolean("is_dynamic"):
        if scheme == "per_tensor":
            return kFp8StaticTensorSym
        return f"{inputs.where}: static activations have qscheme {scheme!r}, expected 'per_tensor'"
    if scheme == "per_tensor":
        return kFp8DynamicTensorSym
    if scheme in ("per_channel", "per_token"):
        return kFp8DynamicTokenSym
    if _is_microscaling(inputs):
        return kMxfp8Dynamic
    size = inputs.integer("group_size")
    if scheme == "per_group" and size is not None:
        return kFp8Dynamic128Sym.with_group(1, size)
    return f"{inputs.where}: qscheme is {scheme!r}, expected 'per_tensor', 'per_channel' or 'per_group'"
