"""AWQ (AutoAWQ, GPTQModel): ``quant_method`` "awq", ``version`` "gemm", 4 bits.

:mod:`moe_wna16.formats.awq_packing` describes the tensors. ``version`` may also be named ``format``. Zero points are
stored unmodified; with ``zero_point`` false every zero point is 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_core.api.formats import LayerExperts, QuantizedFormat, gptq_settings

from moe_wna16.formats.awq_packing import AwqPacking
from moe_wna16.formats.wna16_layout import WNA16Storage


class AwqFormat(QuantizedFormat):
    """Reader of AWQ; the module docstring describes the quantization config."""

    name = "AWQ"
    quant_methods = ("awq",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> WNA16Storage | str:
        settings = gptq_settings(quantization, layer)
        entries = settings.entries
        for name in ("version", "checkpoint_format", "format"):
            found = (entries.text(name, "gemm") or "").lower()
            if found != "gemm":
                return f"{name} is {found!r}, expected 'gemm'"
        if settings.bits != 4:
            return f"bits is {settings.bits}, expected 4"
        if settings.quantized_inputs is not None:
            return settings.quantized_inputs
        return WNA16Storage(
            AwqPacking(4), settings.group_size, not entries.boolean("zero_point", True), settings.summary
        )
