"""AutoRound MXFP4: ``quant_method`` "auto-round" with ``data_type: mx_fp`` and 4 bits.

Per expert and projection ``weight_packed`` uint8 [N, K/2], two codes per byte, the even column low, and
``weight_scale`` uint8 [N, K/32], e8m0. ``act_bits`` 16 means 16-bit activations, 8 MXFP8 and 4 MXFP4. Activation scales
are rounded down, or up if ``act_data_type`` is mx_fp_rceil. ``extra_config`` overrides the quantization config of
individual layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat, auto_round_settings

from moe_mxfp4.formats.mxfp4_layout import Mxfp4Storage


class AutoRoundMxfp4Format(QuantizedFormat):
    """Reader of AutoRound's MXFP4; the module docstring describes the tensors."""

    name = "AutoRound MXFP4"
    quant_methods = ("auto-round", "intel/auto-round")

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Mxfp4Storage | str:
        settings = auto_round_settings(quantization, layer)
        reason = settings.not_mx_weights(4)
        if reason is not None:
            return reason
        activation = settings.mx_activation(4, 8)
        if isinstance(activation, str):
            return activation
        why = f"{settings.data_type} weights with 4 bits: {settings.where}, act_bits {settings.act_bits}"
        return Mxfp4Storage(activation, why, weight="weight_packed")
