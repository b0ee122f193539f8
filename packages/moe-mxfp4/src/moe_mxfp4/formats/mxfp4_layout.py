"""Storage of e2m1 experts and e8m0 scales: validation and conversion to canonical form.

Every tool stores two codes per byte, the even column low, and one scale per 32 columns, so bytes are moved but never
changed. The differences are:

===================  ===================  =====================  ==========================
weight               scale                shape of the weight    tools
===================  ===================  =====================  ==========================
``blocks``           ``scales``           [rows, cols/32, 16]    gpt-oss (all experts at once)
``weight_packed``    ``weight_scale``     [rows, cols/2]         compressed-tensors, AutoRound
``weight``           ``weight_scale``     [rows, cols/2]         Quark, ModelOpt, MiMo
``weight``, int8     ``scale``            [rows, cols/2]         DeepSeek-V4
===================  ===================  =====================  ==========================

gpt-oss interleaves gate and up rows in every tool that stores both in one tensor.

Gate and up read the same activations. If their static activation scales differ, the maximum is used, since it is the
only one of the two with which neither clips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from moe_core import CheckpointError, QuantKey, kMxfp4Static
from moe_core.api.formats import (
    INPUT_SCALES,
    ZERO_POINTS,
    Asking,
    Axes,
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
    gate_rows_first,
    is_interleaved,
    missing_tensor,
    module_name,
    one_suffix,
    refuse_zero_points,
)
from torch import Tensor

from moe_mxfp4.groups import GROUP

#: bytes of a group's codes
GROUP_BYTES = 16
#: suffixes of the codes and of their scales
WEIGHTS = ("blocks", "weight_packed", "weight")
SCALES = ("scales", "weight_scale", "weight_scale_inv", "scale")

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_CODES = (torch.uint8, torch.int8)


@dataclass(frozen=True)
class Mxfp4Storage(ExpertStorage):
    """Quantization of one layer's e2m1 experts; see the base class.

    Attributes:
        activation: quantization of the activations; None for 16-bit activations.
        why: origin of these settings, for messages.
        weight: usual suffix of the codes, for messages.
        scale: usual suffix of the scales, for messages.
    """

    interleaved = True

    activation: QuantKey | None
    why: str
    weight: str = "weight"
    scale: str = "weight_scale"

    def layout(self, layer: LayerExperts) -> Mxfp4Layout:
        mixed = is_interleaved(layer, any(layer.has(projection, "blocks") for projection in layer.projections))
        return Mxfp4Layout(layer, kMxfp4Static, self.activation, self, mixed)


@dataclass(frozen=True, eq=False)
class Mxfp4Layout(QuantizedLayout):
    """Layout of the layer's matrices and scales.

    Attributes:
        storage: quantization of the stored experts.
        mixed: gate and up rows are interleaved.
    """

    storage: Mxfp4Storage
    mixed: bool

    # ------------------------------------------------------------------ names, shapes and dtypes

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        layer = self.layer
        rows, cols = size
        weight = self._weight(projection)
        if layer.dtype(projection, weight) in _FLOATS:
            raise self._unquantized(projection, weight)
        if cols % (GROUP if weight == "blocks" else 2):
            holds = "blocks hold 32 columns" if weight == "blocks" else "a byte holds 2 columns"
            raise CheckpointError(
                f"{layer.name(0, projection, weight)}: {holds}, and the matrix has {cols} ({self.sized})"
            )
        flat = (rows, cols // 2)
        shape = (rows, cols // GROUP, GROUP_BYTES) if weight == "blocks" else flat
        why = f"two codes in a byte; {self.sized}"
        check_expert_tensor(layer, projection, weight, shape, _CODES, why, also=(flat,))
        scale = self._scale(projection)
        groups = (rows, -(-cols // GROUP))
        check_expert_tensor(
            layer, projection, scale, groups, _EXPONENTS, f"one e8m0 scale per 32 columns; {self.sized}"
        )
        if self.is_static:
            static = one_suffix(layer, projection, INPUT_SCALES)
            if static is None:
                raise self._missing(projection, INPUT_SCALES[0])
            one = "one scale of all activations"
            check_expert_tensor(layer, projection, static, (), _FLOATS, one, also=((1,), (1, 1)))
        if has_bias:
            if not layer.has(projection, "bias"):
                raise self._missing(projection, "bias")
            check_expert_tensor(layer, projection, "bias", (rows,), _FLOATS, self.sized)
        self._check_others(projection, size, (weight, scale, "bias"), experts)

    def _weight(self, projection: str) -> str:
        """Return the suffix of the codes; CheckpointError if there is none, or more than one."""
        found = one_suffix(self.layer, projection, WEIGHTS)
        if found is None:
            raise self._missing(projection, self._usual(WEIGHTS, self.storage.weight))
        return found

    def _scale(self, projection: str) -> str:
        found = one_suffix(self.layer, projection, SCALES)
        if found is None:
            raise self._missing(projection, self._usual(SCALES, self.storage.scale))
        return found

    def _usual(self, suffixes: Sequence[str], otherwise: str) -> str:
        """Return which of ``suffixes`` other projections have."""
        layer = self.layer
        return next((s for s in suffixes for p in sorted(layer.projections) if layer.has(p, s)), otherwise)

    def _missing(self, projection: str, suffix: str) -> CheckpointError:
        layer = self.layer
        # stacked tensors have no separate module: their suffix follows an underscore
        separator = "_" if layer.stacked_names else "."
        name = f"{module_name(layer, projection)}{separator}{suffix}"
        return CheckpointError(f"{missing_tensor(layer, name)} ({self.storage.why})")

    def _unquantized(self, projection: str, weight: str) -> CheckpointError:
        """Build the error for a 16-bit projection next to quantized ones.

        Tools leave matrices unquantized whose sizes do not fit the groups.
        """
        layer = self.layer
        name, found = layer.name(0, projection, weight), layer.dtype(projection, weight)
        text = f"{name} has dtype {str(found).removeprefix('torch.')}, expected uint8"
        for other in sorted(layer.projections):
            suffix = one_suffix(layer, other, WEIGHTS)
            if suffix is not None and layer.dtype(other, suffix) is torch.uint8:
                text += f" as {layer.name(0, other, suffix)}: all matrices of a layer's experts must be quantized alike"
                break
        return CheckpointError(f"{text} ({self.storage.why})")

    def _check_others(
        self, projection: str, size: tuple[int, int], used: Sequence[str], experts: Sequence[int]
    ) -> None:
        """Check that no tensor is ignored that would change the values."""
        layer, storage = self.layer, self.storage
        for suffix in layer.suffixes(projection):
            if suffix in used:
                continue
            name = layer.name(0, projection, suffix)
            if suffix in INPUT_SCALES:
                if not self.is_static:
                    self.warn_of_unused(projection, suffix)
            elif suffix in ZERO_POINTS:
                refuse_zero_points(layer, projection, suffix, experts)
            elif suffix == "weight_shape":
                check_stated_shape(layer, projection, size, experts)
            else:
                stored = layer.stored_dtype(projection, suffix)
                raise CheckpointError(f"{name} is {stored}: no MXFP4 format has such a tensor ({storage.why})")

    # ------------------------------------------------------------------ values

    @property
    def interleaved(self) -> bool:
        return self.mixed

    def axes(self, projection: str) -> Mapping[str, Axes]:
        rows, weight = StoredAxis(0), self._weight(projection)
        blocks = len(self.layer.shape(projection, weight)) == 3
        return {
            weight: (rows, StoredAxis(1, GROUP if blocks else 2)),
            self._scale(projection): (rows, StoredAxis(1, GROUP)),
            "bias": (rows, None),
        }

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
        layer, ask = self.layer, partial(checked, self.layer, projections)
        mixed = self.mixed and "gate_up" in projections

        def in_order(rows: Tensor) -> Tensor:
            return gate_rows_first(rows, dim=1) if mixed else rows

        def codes(stored: Tensor) -> Tensor:
            return in_order(stored.view(torch.uint8).flatten(2))

        def exponents(stored: Tensor) -> Tensor:
            return in_order(stored.view(torch.uint8))

        def biases(stored: Tensor) -> Tensor:
            return in_order(stored.float())

        weight, scale = self._weight(projections[0]), self._scale(projections[0])
        # every code is a valid number, so no check is needed
        tensors = {name: (yield Stack(projections, weight, arrange=codes))}
        tensors[f"{name}_scale"] = yield from ask(scale, Values.SCALE, arrange=exponents)
        if self.is_static:
            static = one_suffix(layer, projections[0], INPUT_SCALES) or INPUT_SCALES[0]
            both = yield from ask(static, Values.POSITIVE, arrange=lambda stored: stored.float().reshape(-1, 1))
            tensors[f"{name}_input_scale"] = both.amax(dim=1)
        if has_bias:
            tensors[f"{name}_bias"] = yield from ask("bias", Values.FINITE, arrange=biases)
        return tensors
