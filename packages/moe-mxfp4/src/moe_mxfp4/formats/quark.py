"""AMD Quark: ``fp4`` weights in groups of 32 with e8m0 scales (OCP MXFP4).

Per expert and projection ``weight`` uint8 [N, K/2], two codes in a byte, the even column low, and ``weight_scale``
uint8 [N, K/32].  Experts of gpt-oss keep gate and up in one ``gate_up_proj``, their rows in turns, and have ``bias``.

``input_tensors``: null leaves activations in 16 bits; ``fp4`` and ``fp8_e4m3`` in groups of 32 with e8m0 scales are
dynamic MXFP4 and MXFP8, with scales rounded as ``scale_calculation_mode`` says; ``fp8_e4m3`` is static per tensor
(``input_scale``), dynamic per token (which Quark calls ``per_channel`` or ``per_token``) or in groups of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.checkpoint.quark import quark_layer
from moe_core.quant_key import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)

from moe_mxfp4.formats.mxfp4_experts import Mxfp4Format
from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

_E4M3 = ("fp8_e4m3", "fp8")
#: by ``scale_calculation_mode``: MXFP4 and MXFP8
_MODES = {
    None: (kMxfp4DynamicEven, kMxfp8DynamicEven),
    "even": (kMxfp4DynamicEven, kMxfp8DynamicEven),
    "floor": (kMxfp4DynamicDown, kMxfp8DynamicDown),
}


class QuarkMxfp4Format(Mxfp4Format):
    """See the module docstring."""

    name = "Quark MXFP4"
    quant_methods = ("quark",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        method = quantization.get("quant_method")
        if method != "quark":
            return f"quant_method is {method!r}, expected 'quark'"
        chosen = quark_layer(quantization, layer)
        weight = chosen.part("weight")
        if weight is None:
            return f"{chosen.where}: weight is null"
        if weight.text("dtype") != "fp4":
            return f"{weight.where}: dtype is {weight.text('dtype')!r}, expected 'fp4'"
        if not _is_microscaling(weight):
            return f"{weight.where} is {_said(weight)}, expected per_group of {GROUP} with e8m0 scales"
        if weight.boolean("is_dynamic"):
            return f"{weight.where} is dynamic, expected static"
        if chosen.part("output_tensors") is not None:
            return f"{chosen.where}: output_tensors are quantised, expected null"
        inputs = chosen.part("input_tensors")
        activation = None if inputs is None else _activation(inputs)
        if isinstance(activation, str):
            return activation
        return Mxfp4Storage(activation, f"{_said(weight)} weights: {weight.where}")


def _is_microscaling(entries: QuantEntries) -> bool:
    grouped = entries.text("qscheme") == "per_group" and entries.integer("group_size") == GROUP
    return grouped and entries.text("scale_format") == "e8m0"


def _said(entries: QuantEntries) -> str:
    size = entries.integer("group_size", least=-1)
    of = "" if size is None else f" of {size}"
    return f"{entries.text('dtype')} {entries.text('qscheme')}{of} with {entries.text('scale_format')} scales"


def _activation(inputs: QuantEntries) -> QuantKey | str:
    """The activation key, or why there is none."""
    scheme, dtype, dynamic = inputs.text("qscheme"), inputs.text("dtype"), inputs.boolean("is_dynamic")
    if dynamic and _is_microscaling(inputs) and dtype in ("fp4", *_E4M3):
        mode = inputs.text("scale_calculation_mode")
        if mode not in _MODES:
            return f"{inputs.where}: scale_calculation_mode is {mode!r}, expected 'even' or 'floor'"
        return _MODES[mode][dtype != "fp4"]
    if dtype in _E4M3 and not dynamic and scheme == "per_tensor":
        return kFp8StaticTensorSym
    if dtype in _E4M3 and dynamic and scheme in ("per_channel", "per_token"):
        return kFp8DynamicTokenSym
    exponents = inputs.text("scale_format") == "e8m0"
    if dtype in _E4M3 and dynamic and scheme == "per_group" and inputs.integer("group_size") == 128 and not exponents:
        return kFp8Dynamic128Sym
    kind = "dynamic" if dynamic else "static"
    return (
        f"{inputs.where} is {kind} {_said(inputs)}, expected fp4 or fp8_e4m3 per_group of {GROUP} with e8m0 scales, or "
        "fp8_e4m3 static per_tensor, dynamic per_token or in groups of 128"
    )
