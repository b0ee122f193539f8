"""AutoRound integer weights: ``quant_method`` "auto-round", ``data_type`` "int".

========================  =====================================================================================
``packing_format``        tensors
========================  =====================================================================================
auto_round:auto_gptq      GPTQ's, zero points minus one, no ``g_idx``; 4 or 8 bits
auto_round:auto_awq       AWQ's; 4 bits
auto_round, auto_round:…  GPTQ's with unmodified zero points (older versions: exllamav2, tritonv2)
========================  =====================================================================================

``extra_config`` overrides the quantization config of individual layers. Scales of symmetric weights may be negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat, auto_round_settings

from moe_wna16.formats.awq_packing import AwqPacking
from moe_wna16.formats.gptq_packing import GptqPacking, ZeroPoints
from moe_wna16.formats.packing import BITS, Packing
from moe_wna16.formats.wna16_layout import WNA16Storage


class AutoRoundFormat(QuantizedFormat):
    """Reader of AutoRound's integer exports; the module docstring describes the tensors."""

    name = "AutoRound"
    quant_methods = ("auto-round", "intel/auto-round")

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        settings = auto_round_settings(quantization, layer)
        bits = settings.bits
        if settings.data_type != "int" or bits not in BITS:
            return f"data_type is {settings.data_type!r} with {bits} bits, expected 'int' with 4 or 8"
        if settings.quantized_inputs is not None:
            return settings.quantized_inputs
        packing = _packing(settings.entries, bits)
        if isinstance(packing, str):
            return packing
        # AutoRound's default is symmetric
        return WNA16Storage(packing, settings.group_size, settings.entries.boolean("sym", True), settings.summary)


def _packing(entries: QuantEntries, bits: int) -> Packing | str:
    name = entries.name_of("packing_format", "backend")
    named = (entries.text(name, "auto_round:auto_gptq") or "").lower().replace("-", "_")
    if "awq" in named:
        return AwqPacking(4) if bits == 4 else f"{name} is {named!r} with {bits} bits, expected 4"
    if "gptq" in named:
        return GptqPacking(bits, ZeroPoints.MINUS_ONE)
    tool, _, kernel = named.partition(":")
    if tool in ("auto_round", "autoround") and kernel.partition(":")[0] in ("", "exllamav2", "triton", "tritonv2"):
        return GptqPacking(bits, ZeroPoints.AS_IT_IS)
    return f"{name} is {named!r}, expected 'auto_round:auto_gptq' or 'auto_round:auto_awq'"
