"""AWQ, as AutoAWQ and GPTQModel write it: ``quant_method`` "awq", ``version`` (or ``format``) "gemm", 4 bits.

Tensors: :mod:`moe_wna16.formats.awq_tensors`.  Zero points are as they are; ``zero_point`` false: every one is 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.quant_args import QuantEntries

from moe_wna16.formats.awq_tensors import AwqTensors
from moe_wna16.formats.settings import code_bits, group_size, overridden, quantised_inputs, said
from moe_wna16.formats.wna16_format import WNA16Format
from moe_wna16.formats.wna16_layout import WNA16Storage


class AwqFormat(WNA16Format):
    """See the module docstring."""

    name = "AWQ"
    quant_methods = ("awq",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        method = quantization.get("quant_method")
        if method != "awq":
            return f"quant_method is {method!r}, expected 'awq'"
        where = f"{layer.checkpoint.path / 'config.json'}: quantization_config"
        entries = overridden(QuantEntries(quantization, where), layer)
        for name in ("version", "checkpoint_format", "format"):
            found = (entries.text(name, "gemm") or "").lower()
            if found != "gemm":
                return f"{name} is {found!r}, expected 'gemm'"
        bits = code_bits(entries)
        if bits != 4:
            return f"bits is {bits}, expected 4"
        inputs = quantised_inputs(entries)
        if inputs is not None:
            return inputs
        return WNA16Storage(AwqTensors(4), group_size(entries), not entries.boolean("zero_point", True), said(entries))
