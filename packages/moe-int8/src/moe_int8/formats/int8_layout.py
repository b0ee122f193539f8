"""Storage of int8 and int4 experts and scales: validation and conversion to canonical form.

Channel scales become float32, exactly; a tool's per-matrix scale is repeated for each row. bfloat16 group scales stay
bfloat16; others become float32. Both 4- and 8-bit codes are int8, one per byte.

Gate and up read the same activations, so static scales that differ between them are merged
(:func:`moe_int8.formats.static_inputs.shared_input`).

Weight scales may be negative: AutoRound assigns the code -128 to a row's largest weight, whatever its sign. They may be
0 if the weights are 0 too. A zero scale over other weights is refused, since they cannot be recovered. A static
activation scale must be greater than 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from moe_core import (
    CheckpointError,
    QuantKey,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8StaticChannelSym,
)
from moe_core.api.formats import (
    FLOATS,
    ExpertStorage,
    LayerExperts,
    Matrix,
    QuantizedLayout,
    Shape,
    TensorRule,
    Values,
    one_suffix,
    per_matrix,
    scalar,
)
from torch import Tensor

from moe_int8.formats.packed import unpack_words
from moe_int8.formats.static_inputs import shared_input

#: suffixes of the weight's scale; short ones are of stacked experts
WEIGHT_SCALES = ("weight_scale", "scale")

_INTEGERS = (torch.int8, torch.int32, torch.int64, torch.int16)


@dataclass(frozen=True)
class Int8Storage(ExpertStorage):
    """Quantization of one layer's int8 and int4 experts; see the base class.

    Attributes:
        bits: bits per code, 8 or 4.
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of the quantization config, for messages.
        group: columns that share a scale, -1 for a whole row.
        whole: one scale for a whole matrix instead.
    """

    refused: ClassVar[Mapping[str, str]] = {
        "pre_quant_scale": "scales the activations of each column before they are quantized (SmoothQuant), which no "
        "INT8 backend does: export the model with smoothing folded into its weights"
    }

    bits: int
    activation: QuantKey | None
    why: str
    group: int = -1
    whole: bool = False

    def layout(self, layer: LayerExperts) -> Int8Layout:
        key, bits = self._key(layer), self.bits

        def scales(stored: Tensor, matrix: Matrix) -> Tensor:
            exact, rows = stored.to(key.scale.dtype), matrix.rows
            return exact.reshape(-1, 1, 1).expand(-1, rows, 1) if self.whole else exact.reshape(len(exact), rows, -1)

        multiple = (1, max(self.group, 1))
        rules = (
            TensorRule(
                "weight",
                lambda m: [(m.rows, m.cols)],
                (torch.int8,),
                "weight",
                values=Values.INT4 if bits == 4 else None,
                multiple=multiple,
            ),
            TensorRule(
                "weight_packed",
                lambda m: [(m.rows, -(-m.cols * bits // 32))],
                (torch.int32,),
                "weight",
                values=None,
                arrange=lambda stored, m: unpack_words(stored, bits, m.cols),
                multiple=multiple,
            ),
            TensorRule(WEIGHT_SCALES, self._scale_shapes, FLOATS, "scale", arrange=scales),
            TensorRule(
                "input_zero_point",
                scalar,
                (*_INTEGERS, *FLOATS),
                "input_zero_point",
                arrange=per_matrix,
                by_rows=False,
            ),
        )
        return Int8Layout(layer, key, self.activation, self, rules)

    def _scale_shapes(self, matrix: Matrix) -> Sequence[Shape]:
        """Return the accepted shapes of a projection's scale, the usual one first."""
        if self.whole:
            return scalar(matrix)
        if self.group == -1:
            return [(matrix.rows, 1), (matrix.rows,)]
        return [(matrix.rows, matrix.cols // self.group)]

    def _key(self, layer: LayerExperts) -> QuantKey:
        """Return the canonical weights' key; group scales are bfloat16 if all of the layer's are."""
        if self.bits == 8:
            return kInt8StaticChannelSym
        if self.group == -1:
            return kInt4W4A8StaticChannelSym
        stored = set()
        for projection in layer.projections:
            suffix = one_suffix(layer, projection, WEIGHT_SCALES)
            stored.add(None if suffix is None else layer.dtype(projection, suffix))
        dtype = torch.bfloat16 if stored == {torch.bfloat16} else torch.float32
        return kInt4W4A8StaticGroup128Sym.with_group(1, self.group).with_scale_dtype(dtype)


class Int8Layout(QuantizedLayout):
    """Layout of the layer's matrices and scales, whose static zero points are merged with the scales."""

    def finish(
        self, tensors: dict[str, Tensor], matrix: Matrix, experts: Sequence[int], device: torch.device | str
    ) -> None:
        if "input_scale" not in tensors:
            return
        points = tensors.pop("input_zero_point", None)
        if points is not None:
            bad = (points != points.round()) | (points < -128) | (points > 127)
            if bool(bad.any()):
                expert, projection = (int(i) for i in bad.nonzero()[0])
                name = self.layer.name(experts[expert], matrix.projections[projection], "input_zero_point")
                raise CheckpointError(
                    f"{name} is {float(points[expert, projection]):g}, expected a code of -128 to 127"
                )
            points = points.to(torch.int32)
        tensors["input_scale"], point = shared_input(tensors["input_scale"], points)
        if point is not None:
            tensors["input_zero_point"] = point
