"""MXFP8: ``quant_method: mxfp8`` (MiniMax) and AutoRound's ``auto_round:llm_compressor``.

Per expert and projection: ``weight`` e4m3 [N, K] and ``weight_scale`` or ``weight_scale_inv`` uint8 [N, K/32], e8m0
exponents. Activations are MXFP8. MiniMax rounds their scales up; AutoRound follows ``act_data_type`` (mx_fp down,
mx_fp_rceil up) or keeps activations 16-bit according to ``act_bits``. AutoRound's ``extra_config`` overrides settings
for individual layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core import kMxfp8Dynamic
from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat, auto_round_settings, short

from moe_fp8.formats.fp8_layout import MX_GROUP, Fp8Storage

_WHY = "one e8m0 scale per 32 columns"


class Mxfp8Format(QuantizedFormat):
    """Reader of ``quant_method: mxfp8``."""

    name = "MXFP8 (MiniMax)"
    quant_methods = ("mxfp8",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        entries = QuantEntries(quantization, str(layer.checkpoint.path / "config.json"))
        block = entries.block("weight_block_size")
        if block not in (None, (1, 32)):
            return f"weight_block_size is {short(quantization['weight_block_size'])}, expected [1, 32]"
        scheme = entries.text("activation_scheme", "dynamic")
        if scheme != "dynamic":
            return f"activation_scheme is {scheme!r}, expected 'dynamic'"
        return Fp8Storage(MX_GROUP, kMxfp8Dynamic, f"{_WHY}: quant_method mxfp8", microscaling=True)


class AutoRoundMxfp8Format(QuantizedFormat):
    """Reader of ``quant_method: auto-round`` with ``data_type: mx_fp`` and 8 bits."""

    name = "AutoRound MXFP8"
    quant_methods = ("auto-round", "intel/auto-round")

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        settings = auto_round_settings(quantization, layer)
        reason = settings.not_mx_weights(8)
        if reason is not None:
            return reason
        activation = settings.mx_activation(8)
        if isinstance(activation, str):
            return activation
        why = f"{_WHY}: data_type {settings.data_type} with 8 bits, act_bits {settings.act_bits}"
        return Fp8Storage(MX_GROUP, activation, why, microscaling=True)
