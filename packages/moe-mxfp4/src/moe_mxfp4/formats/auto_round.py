"""AutoRound's MXFP4: ``quant_method`` "auto-round" with ``data_type: mx_fp`` and 4 bits.

Per expert and projection ``weight_packed`` uint8 [N, K/2], two codes in a byte, the even column low, and
``weight_scale`` uint8 [N, K/32], e8m0.  ``act_bits`` 16 leaves activations in 16 bits, 8 is MXFP8, 4 is MXFP4, both
with scales that are rounded down, for ``act_data_type`` mx_fp_rceil up.
``extra_config`` has other settings for some layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import QuantKey, kMxfp4Dynamic, kMxfp4DynamicDown, kMxfp8Dynamic, kMxfp8DynamicDown
from moe_core.format_api import LayerExperts, QuantizedFormat, auto_round_settings

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage
from moe_mxfp4.groups import GROUP

#: by ``act_bits`` and ``act_data_type``
_ACTIVATIONS: dict[tuple[int | None, str], QuantKey] = {
    **{(4, name): kMxfp4DynamicDown for name in ("mx_fp", "mx_fp4", "mx_fp4e2m1")},
    **{(4, name): kMxfp4Dynamic for name in ("mx_fp_rceil", "mx_fp4_rceil", "mx_fp4e2m1_rceil")},
    **{(8, name): kMxfp8DynamicDown for name in ("mx_fp", "mx_fp8", "mx_fp8e4m3")},
    **{(8, name): kMxfp8Dynamic for name in ("mx_fp_rceil", "mx_fp8_rceil", "mx_fp8e4m3_rceil")},
}


class AutoRoundMxfp4Format(QuantizedFormat):
    """See the module docstring."""

    name = "AutoRound MXFP4"
    quant_methods = ("auto-round", "intel/auto-round")

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        settings = auto_round_settings(quantization, layer)
        reason = settings.not_microscaling(4, GROUP)
        if reason is not None:
            return reason
        why = f"{settings.data_type} weights with 4 bits: {settings.where}"
        act_bits = settings.act_bits
        if act_bits == 16:
            return Mxfp4Storage(None, f"{why}, act_bits 16", weight="weight_packed")
        act_type = settings.act_data_type
        activation = _ACTIVATIONS.get((act_bits, str(act_type)))
        if activation is None:
            return f"act_data_type is {act_type!r} with {act_bits} bits, expected 'mx_fp' with 4, 8 or 16"
        reason = settings.wrong_group("act_group_size", GROUP)
        if reason is not None:
            return reason
        if not settings.entries.boolean("act_dynamic", True):
            return "act_dynamic is false, expected true"
        return Mxfp4Storage(activation, f"{why}, act_bits {act_bits}", weight="weight_packed")
