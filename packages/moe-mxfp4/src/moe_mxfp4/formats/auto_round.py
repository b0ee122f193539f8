"""AutoRound's MXFP4: ``quant_method`` "auto-round" with ``data_type: mx_fp`` and 4 bits.

Per expert and projection ``weight_packed`` uint8 [N, K/2], two codes in a byte, the even column low, and
``weight_scale`` uint8 [N, K/32], e8m0.  ``act_bits`` 16 leaves activations in 16 bits, 8 is MXFP8, 4 is MXFP4, both
with scales that are rounded down, for ``act_data_type`` mx_fp_rceil up.
``extra_config`` has other settings for some layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.overrides import with_overrides
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.quant_key import QuantKey, kMxfp4Dynamic, kMxfp4DynamicDown, kMxfp8Dynamic, kMxfp8DynamicDown

from moe_mxfp4.formats.mxfp4_experts import Mxfp4Format
from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

_METHODS = ("auto-round", "intel/auto-round")
#: by ``act_bits`` and ``act_data_type``
_ACTIVATIONS: dict[tuple[int | None, str], QuantKey] = {
    **{(4, name): kMxfp4DynamicDown for name in ("mx_fp", "mx_fp4", "mx_fp4e2m1")},
    **{(4, name): kMxfp4Dynamic for name in ("mx_fp_rceil", "mx_fp4_rceil", "mx_fp4e2m1_rceil")},
    **{(8, name): kMxfp8DynamicDown for name in ("mx_fp", "mx_fp8", "mx_fp8e4m3")},
    **{(8, name): kMxfp8Dynamic for name in ("mx_fp_rceil", "mx_fp8_rceil", "mx_fp8e4m3_rceil")},
}


class AutoRoundMxfp4Format(Mxfp4Format):
    """See the module docstring."""

    name = "AutoRound MXFP4"
    quant_methods = _METHODS

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        method = quantization.get("quant_method")
        if method not in _METHODS:
            return f"quant_method is {method!r}, expected 'auto-round'"
        where = f"{layer.checkpoint.path / 'config.json'}: quantization_config"
        entries = with_overrides(QuantEntries(quantization, where), "extra_config", layer)
        data_type, bits = entries.text("data_type", "int"), entries.integer("bits")
        if not _is_mx(data_type) or bits != 4:
            return f"data_type is {data_type!r} with {bits} bits, expected 'mx_fp' with 4"
        size = entries.integer("group_size", GROUP, least=-1)
        if size != GROUP:
            return f"group_size is {size}, expected {GROUP}"
        why = f"{data_type} weights with 4 bits: {entries.where}"
        act_bits = entries.integer("act_bits", 16)
        if act_bits == 16:
            return Mxfp4Storage(None, f"{why}, act_bits 16", weight="weight_packed")
        act_type = entries.text("act_data_type", data_type)
        activation = _ACTIVATIONS.get((act_bits, str(act_type)))
        if activation is None:
            return f"act_data_type is {act_type!r} with {act_bits} bits, expected 'mx_fp' with 4, 8 or 16"
        size = entries.integer("act_group_size", GROUP, least=-1)
        if size != GROUP:
            return f"act_group_size is {size}, expected {GROUP}"
        if not entries.boolean("act_dynamic", True):
            return "act_dynamic is false, expected true"
        return Mxfp4Storage(activation, f"{why}, act_bits {act_bits}", weight="weight_packed")


def _is_mx(name: str | None) -> bool:
    return name is not None and name.startswith("mx_fp")
