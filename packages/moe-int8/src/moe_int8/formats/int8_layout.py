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
from functools import partial

import torch
from moe_core import (
    CheckpointError,
    QuantKey,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8StaticChannelSym,
)
from moe_core.api.formats import (
    INPUT_SCALES,
    ZERO_POINTS,
    Asking,
    Axes,
    BadValuesError,
    ExpertMatrices,
    ExpertStorage,
    LayerExperts,
    QuantizedLayout,
    Stack,
    StoredAxis,
    Values,
    check_expert_tensor,
    check_stated_shape,
    checked,
    missing,
    one_suffix,
    refuse_lost_weights,
    refuse_mixed,
    refuse_zero_points,
)
from torch import Tensor

from moe_int8.formats.packed import unpack_words
from moe_int8.formats.static_inputs import shared_input

#: suffixes of the weight's scale; short ones are of stacked experts
WEIGHT_SCALES = ("weight_scale", "scale")
WEIGHTS = ("weight", "weight_packed")

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.int32, torch.int64, torch.int16)


@dataclass(frozen=True)
class Int8Storage(ExpertStorage):
    """Quantization of one layer's int8 and int4 experts; see the base class.

    Attributes:
        bits: bits per code, 8 or 4.
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of these settings, for messages.
        group: columns that share a scale, -1 for a whole row.
        whole: one scale for a whole matrix instead.
    """

    bits: int
    activation: QuantKey | None
    why: str
    group: int = -1
    whole: bool = False

    def layout(self, layer: LayerExperts) -> Int8Layout:
        found = [one_suffix(layer, projection, WEIGHTS) for projection in sorted(layer.projections)]
        stored = sorted({suffix for suffix in found if suffix is not None})
        if len(stored) > 1:
            raise CheckpointError(
                f"{layer.prefix} has {' and '.join(stored)}: all matrices of a layer's experts must be stored alike"
            )
        return Int8Layout(layer, self._key(layer), self.activation, self, stored[0] if stored else WEIGHTS[0])

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


@dataclass(frozen=True, eq=False)
class Int8Layout(QuantizedLayout):
    """Layout of the layer's matrices and scales.

    Attributes:
        storage: quantization of the stored experts.
        weight: suffix of the codes, which are bytes or packed words.
    """

    storage: Int8Storage
    weight: str

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        layer, storage, weight = self.layer, self.storage, self.weight
        rows, cols = size
        refuse_mixed(layer, projection, _FLOATS, (torch.int8,))
        if weight == "weight":
            check_expert_tensor(layer, projection, weight, (rows, cols), (torch.int8,), self.sized)
        else:
            words = -(-cols * storage.bits // 32)
            check_expert_tensor(
                layer, projection, weight, (rows, words), (torch.int32,), f"{storage.bits} bits, {self.sized}"
            )
        self._check_groups(projection, cols)
        scale = one_suffix(layer, projection, WEIGHT_SCALES)
        if scale is None:
            raise CheckpointError(f"{missing(layer, projection, 'weight_scale', weight=weight)} ({storage.why})")
        shape, *also = self._scale_shapes(rows, cols)
        check_expert_tensor(layer, projection, scale, shape, _FLOATS, storage.why, also=also)
        static = self._static(projection)
        for suffix, dtypes, what in ((static[0], _FLOATS, "scale"), (static[1], (*_INTEGERS, *_FLOATS), "zero point")):
            if suffix is not None:
                check_expert_tensor(
                    layer, projection, suffix, (), dtypes, f"one {what} of all activations", also=((1,), (1, 1))
                )
        if has_bias:
            check_expert_tensor(layer, projection, "bias", (rows,), _FLOATS, self.sized)
        self._check_others(projection, size, scale, static, experts)

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
        layer, storage, ask = self.layer, self.storage, partial(checked, self.layer, projections)
        rows, cols = matrices.sizes[projections[0]]
        scale = one_suffix(layer, projections[0], WEIGHT_SCALES) or WEIGHT_SCALES[0]
        dtype = self.weight_key.scale.dtype

        def scales(stored: Tensor) -> Tensor:
            exact = stored.to(dtype)
            return exact.reshape(-1, 1, 1).expand(-1, rows, 1) if storage.whole else exact.reshape(len(exact), rows, -1)

        tensors = {name: (yield from self._codes(projections, cols))}
        tensors[f"{name}_scale"] = yield from ask(scale, Values.FINITE, arrange=scales)
        refuse_lost_weights(
            layer,
            projections,
            scale,
            tensors[name],
            tensors[f"{name}_scale"],
            self.weight_key,
            experts=experts,
            is_zero=lambda codes: codes == 0,
            weight_suffix=self.weight,
        )
        static, zero = self._static(projections[0])
        if static is not None:
            every = yield from ask(static, Values.POSITIVE, arrange=lambda stored: stored.float().reshape(-1, 1))
            points = None
            if zero is not None:
                points = yield from ask(zero, Values.FINITE, arrange=lambda stored: stored.double().reshape(-1, 1))
                self._check_zero_points(points, projections, zero, experts)
                points = points.to(torch.int32)
            tensors[f"{name}_input_scale"], point = shared_input(every, points)
            if point is not None:
                tensors[f"{name}_input_zero_point"] = point
        if has_bias:
            tensors[f"{name}_bias"] = yield from ask("bias", Values.FINITE, arrange=torch.Tensor.float)
        return tensors

    # ------------------------------------------------------------------ parts

    def axes(self, projection: str) -> Mapping[str, Axes]:
        storage, rows = self.storage, StoredAxis(0)
        found: dict[str, Axes] = {
            self.weight: (rows, StoredAxis(1, 1 if self.weight == "weight" else 32 // storage.bits)),
            "bias": (rows, None),
        }
        scale = one_suffix(self.layer, projection, WEIGHT_SCALES)
        if scale is not None and not storage.whole:
            found[scale] = (rows, None if storage.group == -1 else StoredAxis(1, storage.group))
        return found

    def _codes(self, projections: tuple[str, ...], cols: int) -> Asking[Tensor]:
        """Read int8 codes [E, rows, cols]; 4-bit codes out of range are refused."""
        layer, bits = self.layer, self.storage.bits

        def unpacked(stored: Tensor) -> Tensor:
            return unpack_words(stored, bits, cols)

        def out_of_range(kept: Tensor) -> Tensor:
            low, high = torch.aminmax(kept)
            return (low < -8) | (high > 7)

        in_bytes = self.weight == "weight"
        try:
            return (
                yield Stack(
                    projections,
                    self.weight,
                    arrange=None if in_bytes else unpacked,
                    check=out_of_range if in_bytes and bits == 4 else None,
                )
            )
        except BadValuesError as error:
            stored = layer.tensor(error.expert, error.projection, self.weight)
            bad = (stored < -8) | (stored > 7)
            where = [int(i) for i in bad.nonzero()[0]]
            raise CheckpointError(
                f"{error.tensor} has {int(bad.sum())} of {stored.numel()} values outside -8 to 7, first "
                f"{int(stored[tuple(where)])} at {where}: expected 4-bit codes ({self.storage.why})"
            ) from None

    def _check_zero_points(
        self, points: Tensor, projections: tuple[str, ...], suffix: str, experts: Sequence[int]
    ) -> None:
        """Check that the zero points [E, projections] are valid codes."""
        bad = (points != points.round()) | (points < -128) | (points > 127)
        if bool(bad.any()):
            expert, projection = (int(i) for i in bad.nonzero()[0])
            name = self.layer.name(experts[expert], projections[projection], suffix)
            raise CheckpointError(f"{name} is {float(points[expert, projection]):g}, expected a code of -128 to 127")

    def _check_groups(self, projection: str, cols: int) -> None:
        group = self.storage.group
        if group > 0 and cols % group:
            name = self.layer.name(0, projection, self.weight)
            raise CheckpointError(
                f"{name} has {cols} columns, expected a multiple of the group of {group} ({self.storage.why})"
            )

    def _scale_shapes(self, rows: int, cols: int) -> list[tuple[int, ...]]:
        """Return the accepted shapes of a projection's scale, the usual one first."""
        if self.storage.whole:
            return [(), (1,), (1, 1)]
        if self.storage.group == -1:
            return [(rows, 1), (rows,)]
        return [(rows, cols // self.storage.group)]

    def _static(self, projection: str) -> tuple[str | None, str | None]:
        """Return the suffixes of the static activation scale and zero point, None if unused."""
        activation, layer, why = self.activation_key, self.layer, self.storage.why
        if activation is None or not activation.is_static:
            return None, None
        scale = one_suffix(layer, projection, INPUT_SCALES)
        if scale is None:
            raise CheckpointError(f"{missing(layer, projection, INPUT_SCALES[0], weight=self.weight)} ({why})")
        if activation.symmetric:
            return scale, None
        if not layer.has(projection, "input_zero_point"):
            raise CheckpointError(f"{missing(layer, projection, 'input_zero_point', weight=self.weight)} ({why})")
        return scale, "input_zero_point"

    def _check_others(
        self,
        projection: str,
        size: tuple[int, int],
        scale: str,
        static: tuple[str | None, str | None],
        experts: Sequence[int],
    ) -> None:
        """Check that no tensor is ignored that would change the values."""
        layer = self.layer
        for suffix in layer.suffixes(projection):
            if suffix in (self.weight, "bias", scale, *static):
                continue
            name = layer.name(0, projection, suffix)
            if suffix in INPUT_SCALES:
                self.warn_of_unused(projection, suffix)
            elif suffix in ZERO_POINTS:
                refuse_zero_points(layer, projection, suffix, experts)
            elif suffix == "weight_shape" and self.weight == "weight_packed":
                check_stated_shape(layer, projection, size, experts)
            elif suffix == "pre_quant_scale":
                raise CheckpointError(
                    f"{name} scales the activations of each column before they are quantized (SmoothQuant), "
                    "which no INT8 backend does: export the model with smoothing folded into its weights"
                )
            else:
                stored = layer.stored_dtype(projection, suffix)
                raise CheckpointError(f"{name} is {stored}: no INT8 format has such a tensor")
