"""INT8 experts of an imaginary tool.

Per expert and projection the checkpoint has ``weight`` int8 [N, K] and ``row_scale`` float32 [N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import QuantKey, kInt8DynamicTokenSym, kInt8StaticChannelSym
from moe_core.api.formats import ExpertStorage, LayerExperts, QuantizedFormat, QuantizedLayout, TensorRule, Values

_ACTIVATIONS = {8: kInt8DynamicTokenSym, 16: None}
#: Tensors of a matrix; whatever else is stored is refused, since it might change the values.
RULES = (
    TensorRule("weight", lambda m: [(m.rows, m.cols)], (torch.int8,), "weight", values=None),
    TensorRule(
        "row_scale",
        lambda m: [(m.rows,)],
        (torch.float32,),
        "scale",
        values=Values.SCALE,
        arrange=lambda stored, m: stored.unsqueeze(-1),
    ),
)


@dataclass(frozen=True)
class ExampleStorage(ExpertStorage):
    """Quantization settings of the layer's experts from config.json; see the base class."""

    activation: QuantKey | None
    why: str

    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        return QuantizedLayout(layer, kInt8StaticChannelSym, self.activation, self, RULES)


class ExampleFormat(QuantizedFormat):
    """Reader of the imaginary tool's INT8; the module docstring describes the tensors."""

    # interface version that this class was written for
    format_api = (1, 0)
    name = "INT8 of an imaginary tool"
    quant_methods = ("example",)

    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExampleStorage | str:
        bits = quantization.get("activation_bits", 8)
        if bits not in _ACTIVATIONS:
            return f"activation_bits is {bits!r}, expected 8 or 16"
        return ExampleStorage(_ACTIVATIONS[bits], f"quant_method example, activation_bits {bits}")
