"""GPTQ, as AutoGPTQ and GPTQModel write it: ``quant_method`` "gptq", 4 or 8 bits.

Tensors: :mod:`moe_wna16.formats.gptq_tensors`.  ``checkpoint_format`` "gptq" (or none) keeps zero points minus one,
"gptq_v2" as they are; ``sym`` true: every zero point is the middle of the codes.  Whether columns are grouped out of
order is read off ``g_idx``, which GPTQModel writes with ``desc_act`` false, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quant_args import QuantEntries
from moe_core.checkpoint.statements import quantizers

from moe_wna16.formats.gptq_tensors import GptqTensors, ZeroPoints
from moe_wna16.formats.settings import BITS, code_bits, group_size, overridden, quantised_inputs, said, symmetry
from moe_wna16.formats.wna16_format import WNA16Format
from moe_wna16.formats.wna16_layout import WNA16Storage


class GptqFormat(WNA16Format):
    """See the module docstring."""

    name = "GPTQ"
    quant_methods = ("gptq",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        method = quantization.get("quant_method")
        if method != "gptq":
            return f"quant_method is {method!r}, expected 'gptq'"
        where = f"{layer.checkpoint.path / 'config.json'}: quantization_config"
        entries = overridden(QuantEntries(quantization, where), layer)
        named = (entries.text(entries.name_of("checkpoint_format", "format")) or "gptq").lower()
        if named not in ("gptq", "gptq_v2") or entries.boolean("is_marlin_format"):
            found = named if named not in ("gptq", "gptq_v2") else "marlin"
            return f"checkpoint_format is {found!r}, expected 'gptq' or 'gptq_v2'"
        if entries.text("pack_dtype", "int32") != "int32":
            return f"pack_dtype is {entries.text('pack_dtype')!r}, expected 'int32'"
        bits = code_bits(entries)
        if bits not in BITS:
            return f"bits is {bits}, expected 4 or 8"
        inputs = quantised_inputs(entries)
        if inputs is not None:
            return inputs
        version_1 = ZeroPoints.WORDS_MINUS_ONE if _is_gptqmodels(quantization) else ZeroPoints.MINUS_ONE
        stored = GptqTensors(bits, ZeroPoints.AS_IT_IS if named == "gptq_v2" else version_1)
        return WNA16Storage(
            stored,
            group_size(entries),
            symmetry(entries, layer, stored),
            said(entries),
            ordered=entries.boolean("desc_act"),
        )


def _is_gptqmodels(quantization: Mapping[str, Any]) -> bool:
    """Whether GPTQModel says that it wrote the file."""
    return "gptqmodel" in (quantizers(quantization.get("meta")) or ())
