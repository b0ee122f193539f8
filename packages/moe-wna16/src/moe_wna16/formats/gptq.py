"""GPTQ (AutoGPTQ, GPTQModel): ``quant_method`` "gptq", 4 or 8 bits.

:mod:`moe_wna16.formats.gptq_packing` describes the tensors. ``checkpoint_format`` "gptq" (or none) stores zero points
minus one, "gptq_v2" unmodified. With ``sym`` true every zero point is the middle of the code range. ``g_idx``
determines whether columns are grouped out of order, since GPTQModel also writes it with ``desc_act`` false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantEntries, QuantizedFormat, gptq_settings, quantizers

from moe_wna16.formats.gptq_packing import GptqPacking, ZeroPoints
from moe_wna16.formats.packing import BITS
from moe_wna16.formats.wna16_layout import WNA16Storage


class GptqFormat(QuantizedFormat):
    """Reader of GPTQ; the module docstring describes the quantization config."""

    name = "GPTQ"
    quant_methods = ("gptq",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        settings = gptq_settings(quantization, layer)
        entries = settings.entries
        named = (entries.text(entries.name_of("checkpoint_format", "format")) or "gptq").lower()
        if named not in ("gptq", "gptq_v2") or entries.boolean("is_marlin_format"):
            found = named if named not in ("gptq", "gptq_v2") else "marlin"
            return f"checkpoint_format is {found!r}, expected 'gptq' or 'gptq_v2'"
        if entries.text("pack_dtype", "int32") != "int32":
            return f"pack_dtype is {entries.text('pack_dtype')!r}, expected 'int32'"
        bits = settings.bits
        if bits not in BITS:
            return f"bits is {bits}, expected 4 or 8"
        if settings.quantized_inputs is not None:
            return settings.quantized_inputs
        version_1 = ZeroPoints.WORDS_MINUS_ONE if _is_gptqmodels(quantization) else ZeroPoints.MINUS_ONE
        stored = GptqPacking(bits, ZeroPoints.AS_IT_IS if named == "gptq_v2" else version_1)
        return WNA16Storage(
            stored,
            settings.group_size,
            _is_symmetric(entries, layer),
            settings.summary,
            ordered=entries.boolean("desc_act"),
        )


def _is_symmetric(entries: QuantEntries, layer: LayerExperts) -> bool:
    """Return ``sym``, or if it is not given, whether the checkpoint has no zero points."""
    if entries.entries.get("sym") is not None:
        return entries.boolean("sym")
    return not any(layer.has(projection, "qzeros") for projection in layer.projections)


def _is_gptqmodels(quantization: Mapping[str, Any]) -> bool:
    """Return whether the quantization config names GPTQModel as the writer."""
    return "gptqmodel" in (quantizers(quantization.get("meta")) or ())
