"""INT8 experts of an imaginary tool.

Per expert and projection the checkpoint has ``weight`` int8 [N, K] and ``row_scale`` float32 [N].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from moe_core import CheckpointError, QuantKey, kInt8DynamicTokenSym, kInt8StaticChannelSym
from moe_core.api.formats import (
    Asking,
    Axes,
    ExpertMatrices,
    ExpertStorage,
    LayerExperts,
    QuantizedFormat,
    QuantizedLayout,
    Stack,
    StoredAxis,
    Values,
    check_expert_tensor,
    checked,
    missing,
)
from torch import Tensor

_ACTIVATIONS = {8: kInt8DynamicTokenSym, 16: None}


@dataclass(frozen=True)
class ExampleStorage(ExpertStorage):
    """Quantization settings of the layer's experts from config.json; see the base class."""

    activation: QuantKey | None
    why: str

    def layout(self, layer: LayerExperts) -> ExampleLayout:
        return ExampleLayout(layer, kInt8StaticChannelSym, self.activation, self)


@dataclass(frozen=True, eq=False)
class ExampleLayout(QuantizedLayout):
    """Layout of the layer's tensors."""

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        check_expert_tensor(self.layer, projection, "weight", size, (torch.int8,), self.sized)
        if not self.layer.has(projection, "row_scale"):
            raise CheckpointError(f"{missing(self.layer, projection, 'row_scale')} ({self.storage.why})")
        check_expert_tensor(self.layer, projection, "row_scale", size[:1], (torch.float32,), self.storage.why)
        others = sorted({*self.layer.suffixes(projection)} - {"weight", "row_scale"})
        if others:  # refuse tensors that might change the values
            raise CheckpointError(f"{self.layer.name(0, projection, others[0])} is no tensor of this format")

    def stack(
        self,
        name: str,
        projections: tuple[str, ...],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> Asking[dict[str, Tensor]]:
        codes = yield Stack(projections, "weight")  # [E, N, K]; w13 is [E, 2N, K]: gate rows, then up rows
        scales = yield from checked(self.layer, projections, "row_scale", Values.SCALE)  # [E, N]
        return {name: codes, f"{name}_scale": scales.unsqueeze(-1)}

    def axes(self, projection: str) -> Mapping[str, Axes]:
        rows, columns = StoredAxis(0), StoredAxis(1)
        return {"weight": (rows, columns), "row_scale": (rows, None)}


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
