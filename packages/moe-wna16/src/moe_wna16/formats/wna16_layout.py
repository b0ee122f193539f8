"""Storage of int4 and int8 experts: validation and conversion to canonical form.

Codes become unsigned, in canonical bytes. Scales keep the file's dtype if all of the layer's agree, else they become
float32. Zero points become what is subtracted from a code. Scales may be negative: AutoRound assigns the code -8 to a
group's largest weight, whatever its sign.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from moe_core import (
    CheckpointError,
    CheckpointWarning,
    QuantKey,
    dequantize_weight,
    kInt4Static,
    kInt4StaticAsym,
    kInt8Static,
    kInt8StaticAsym,
)
from moe_core.api.formats import (
    INPUT_SCALES,
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
    gate_rows_first,
    is_interleaved,
    load_checked,
    missing_tensor,
    module_name,
    refuse_zero_points,
)
from torch import Tensor

from moe_wna16.formats.columns import DTYPES, ColumnGroups
from moe_wna16.formats.packing import Packing, Shape

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: a multiple of the number of codes in any word
_MANY = 64


@dataclass(frozen=True)
class WNA16Storage(ExpertStorage):
    """Quantization of one layer's int4 and int8 experts; see the base class.

    Attributes:
        packing: tensors of the tool.
        group: columns that share a scale, -1 for a whole row.
        symmetric: the zero point is the middle of the code range; stored zero points must agree.
        why: origin of these settings, for messages.
        activation: quantization of the activations; None for 16-bit activations.
        ordered: the config states that columns are grouped in another order, so ``g_idx`` is required.
    """

    interleaved = True

    packing: Packing
    group: int
    symmetric: bool
    why: str
    activation: QuantKey | None = None
    ordered: bool = False

    def layout(self, layer: LayerExperts) -> WNA16Layout:
        packing = self.packing
        columns = ColumnGroups.of(layer, packing, self.group, self.symmetric)
        symmetric, zero_points = (kInt4Static, kInt4StaticAsym) if packing.bits == 4 else (kInt8Static, kInt8StaticAsym)
        key = symmetric if self.symmetric else zero_points
        pre_scaled = packing.pre_scale is not None and any(layer.has(p, packing.pre_scale) for p in layer.projections)
        key = key.with_group(1, self.group).with_scale_dtype(_scale_dtype(layer, packing.scale))
        key = replace(key, permuted=columns.permuted, pre_scaled=pre_scaled)
        return WNA16Layout(layer, key, self.activation, self, columns, is_interleaved(layer))


def _scale_dtype(layer: LayerExperts, suffix: str) -> torch.dtype:
    """Return the scales' dtype: the file's if all of the layer's agree, else float32."""
    found = {layer.dtype(projection, suffix) for projection in layer.projections if layer.has(projection, suffix)}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in _FLOATS else torch.float32


@dataclass(frozen=True, eq=False)
class WNA16Layout(QuantizedLayout):
    """Layout of the layer's matrices.

    Attributes:
        storage: quantization of the stored experts.
        columns: which columns share scales.
        mixed: gate and up rows are interleaved.
    """

    storage: WNA16Storage
    columns: ColumnGroups
    mixed: bool = False

    # ------------------------------------------------------------------ names, shapes and dtypes

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        layer, storage, packing = self.layer, self.storage, self.storage.packing
        rows, cols = size
        groups = self._groups(cols)
        if not layer.has(projection, packing.weight):
            raise self._missing(projection, packing.weight)
        if layer.dtype(projection, packing.weight) in _FLOATS:
            self._refuse_unquantized(projection)
        unfit = packing.unfit(rows, cols)
        if unfit is not None:
            raise CheckpointError(f"{layer.name(0, projection, packing.weight)}: {unfit} ({self.sized})")
        self._check_tensor(
            projection,
            packing.weight,
            [packing.weight_shape(rows, cols)],
            packing.weight_dtypes,
            f"{storage.why}; {self.sized}",
        )
        self._check_tensor(projection, packing.scale, packing.scale_shapes(rows, groups), _FLOATS, storage.why)
        if packing.zero is not None and not storage.symmetric:
            self._check_zero_points(projection, rows, groups)
        if packing.g_idx is not None:
            if layer.has(projection, packing.g_idx):
                self._check_tensor(projection, packing.g_idx, [(cols,)], DTYPES, "one per column")
            elif storage.ordered and storage.group != -1:
                raise self._missing(projection, packing.g_idx)
        if packing.pre_scale is not None and layer.has(projection, packing.pre_scale):
            self._check_tensor(projection, packing.pre_scale, [(cols,)], _FLOATS, "one per column")
        if has_bias:
            self._check_tensor(projection, "bias", [(rows,)], _FLOATS, self.sized)
        self._check_others(projection, size, experts)

    def _groups(self, cols: int) -> int:
        return 1 if self.storage.group == -1 else -(-cols // self.storage.group)

    def _check_tensor(
        self,
        projection: str,
        suffix: str,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype],
        why: str,
    ) -> None:
        if not self.layer.has(projection, suffix):
            raise self._missing(projection, suffix)
        check_expert_tensor(self.layer, projection, suffix, shapes[0], dtypes, why, also=shapes[1:])

    def _check_zero_points(self, projection: str, rows: int, groups: int) -> None:
        packing, layer = self.storage.packing, self.layer
        if packing.zero is None or not layer.has(projection, packing.zero):
            raise self._missing(projection, packing.zero or "zero_point")
        shapes = packing.zero_shapes(rows, groups, layer.dtype(projection, packing.zero))
        self._check_tensor(projection, packing.zero, shapes, packing.zero_dtypes, self.storage.why)

    def _check_others(self, projection: str, size: tuple[int, int], experts: Sequence[int]) -> None:
        """Check that no tensor is ignored that would change the values."""
        layer, packing = self.layer, self.storage.packing
        used = {packing.weight, "bias", packing.scale, packing.zero, packing.g_idx, packing.pre_scale}
        for suffix in layer.suffixes(projection):
            if suffix in used:
                continue
            name = layer.name(0, projection, suffix)
            if suffix in INPUT_SCALES:
                self.warn_of_unused(projection, suffix)
            elif suffix == "weight_shape":
                check_stated_shape(layer, projection, size, experts)
            else:
                kind = layer.stored_dtype(projection, suffix)
                raise CheckpointError(
                    f"{name} is {kind}: experts of this format have no such tensor ({self.storage.why})"
                )

    def _missing(self, projection: str, suffix: str) -> CheckpointError:
        self._refuse_unquantized(projection)
        name = f"{module_name(self.layer, projection)}{self.storage.packing.joint}{suffix}"
        return CheckpointError(f"{missing_tensor(self.layer, name)} ({self.storage.why})")

    def _refuse_unquantized(self, projection: str) -> None:
        """Raise CheckpointError for a 16-bit projection next to quantized ones."""
        layer, suffix = self.layer, self.storage.packing.weight
        if not layer.has(projection, "weight") or layer.dtype(projection, "weight") not in _FLOATS:
            return
        name = layer.name(0, projection, "weight")
        found = str(layer.dtype(projection, "weight")).removeprefix("torch.")
        for other in sorted(layer.projections):
            if layer.has(other, suffix) and layer.dtype(other, suffix) not in _FLOATS:
                raise CheckpointError(
                    f"{name} has dtype {found}, expected {suffix} as {layer.name(0, other, suffix)}: all matrices of a "
                    "layer's experts must be quantized alike"
                )
        raise CheckpointError(f"{name} has dtype {found}, expected {suffix} ({self.storage.why})")

    # ------------------------------------------------------------------ values

    @property
    def interleaved(self) -> bool:
        return self.mixed

    def axes(self, projection: str) -> Mapping[str, Axes]:
        layer, packing, group = self.layer, self.storage.packing, self.storage.group
        found: dict[str, Axes] = {"bias": (StoredAxis(0), None)}
        if packing.pre_scale is not None:
            found[packing.pre_scale] = (None, StoredAxis(0))
        # sizes divisible by every word and group size
        rows, cols = _MANY, _MANY * max(group, 1)
        found[packing.weight] = _axes(packing.weight_shape, rows, cols)
        for suffix in (packing.scale, packing.zero):
            if suffix is None or not layer.has(projection, suffix):
                continue
            shapes = partial(self._grouped_shape, projection, suffix)
            along = _axes(shapes, rows, cols)
            # in permuted order, columns of any shard may belong to any group
            found[suffix] = (along[0], None) if self.columns.permuted else along
        return found

    def _grouped_shape(self, projection: str, suffix: str, rows: int, cols: int) -> Shape:
        """Return the shape of scales or zero points, in the variant that the file uses."""
        layer, packing, groups = self.layer, self.storage.packing, self._groups(cols)
        if suffix == packing.scale:
            shapes = packing.scale_shapes(rows, groups)
        else:
            shapes = packing.zero_shapes(rows, groups, layer.dtype(projection, suffix))
        dims = len(layer.shape(projection, suffix))
        return next((shape for shape in shapes if len(shape) == dims), shapes[0])

    def columns_of(self, begin: int, end: int, size: int) -> QuantizedLayout:
        columns = replace(self.columns, window=(begin, end, size))
        return replace(super().columns_of(begin, end, size), columns=columns)  # type: ignore[call-arg]

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
        layer, storage, packing, key = self.layer, self.storage, self.storage.packing, self.weight_key
        rows, cols = matrices.sizes[projections[0]]
        mixed = self.mixed and "gate_up" in projections

        def in_order(values: Tensor) -> Tensor:
            return gate_rows_first(values, dim=1) if mixed else values

        def finite(suffix: str, arrange: Callable[[Tensor], Tensor]) -> Asking[Tensor]:
            return checked(layer, projections, suffix, Values.FINITE, arrange=lambda found: in_order(arrange(found)))

        tensors = {name: (yield from self._codes(projections, cols, experts, in_order))}
        tensors[f"{name}_scale"] = yield from finite(
            packing.scale, lambda found: packing.scales(found, rows).to(key.scale.dtype)
        )
        if not storage.symmetric and packing.zero is not None:
            tensors[f"{name}_zero_point"] = yield Stack(
                projections, packing.zero, arrange=lambda found: in_order(packing.zeros(found, rows))
            )
        else:
            self._check_symmetric(projections, rows, cols, experts)
        if key.permuted:
            tensors[f"{name}_g_idx"] = self.columns.load(
                projections,
                cols=cols,
                groups=self._groups(self.columns.row_length(projections[0], cols)),
                experts=experts,
                device=device,
            )
        if key.pre_scaled:
            tensors[f"{name}_pre_scale"] = self._pre_scale(projections, cols, experts, device)
        self._refuse_lost_weights(name, tensors, projections, cols, experts)
        if has_bias:
            tensors[f"{name}_bias"] = yield from finite("bias", Tensor.float)
        return tensors

    def _codes(
        self, projections: tuple[str, ...], cols: int, experts: Sequence[int], in_order: Callable[[Tensor], Tensor]
    ) -> Asking[Tensor]:
        """Read canonical codes with rows ``in_order``; 4-bit codes out of range are refused."""
        packing = self.storage.packing

        def arrange(found: Tensor) -> Tensor:
            bad = packing.refused_codes(found)
            if bad is not None and bool(bad.any()):
                raise BadValuesError("", int(bad.sum()), found.numel())
            return in_order(packing.codes(found, cols))

        try:
            return (yield Stack(projections, packing.weight, arrange=arrange))
        except BadValuesError:
            raise self._bad_codes(projections, experts) from None

    def _bad_codes(self, projections: tuple[str, ...], experts: Sequence[int]) -> CheckpointError:
        layer, packing = self.layer, self.storage.packing
        for expert in experts:
            for projection in projections:
                found = layer.tensor(expert, projection, packing.weight)
                bad = packing.refused_codes(found)
                if bad is not None and bool(bad.any()):
                    at = [int(i) for i in bad.nonzero()[0]]
                    name, half = layer.name(expert, projection, packing.weight), 1 << (packing.bits - 1)
                    return CheckpointError(
                        f"{name} has {int(bad.sum())} of {found.numel()} values outside {-half} to {half - 1}, first "
                        f"{int(found[tuple(at)])} at {at}: expected {packing.bits}-bit codes ({self.storage.why})"
                    )
        return CheckpointError(f"{layer.prefix} holds codes of more than {packing.bits} bits")

    def _check_symmetric(self, projections: tuple[str, ...], rows: int, cols: int, experts: Sequence[int]) -> None:
        """Check that stored zero points of a symmetric type are the middle of the code range."""
        layer, packing = self.layer, self.storage.packing
        half = 1 << (packing.bits - 1)
        for projection in projections:
            if packing.zero is None or not layer.has(projection, packing.zero):
                continue
            if layer.dtype(projection, packing.zero) is not torch.int32:
                refuse_zero_points(layer, projection, packing.zero, experts)
                continue
            self._check_zero_points(projection, rows, self._groups(self.columns.row_length(projection, cols)))
            # usually equal for all experts
            same = self.columns.zeros.get(projection) if self.columns.window is None else None
            if same is None:
                stored = layer.stacked(projection, packing.zero, experts)
                same = stored[: 1 if bool((stored == stored[0]).all()) else None]
            zeros = packing.zeros(same, rows)
            bad = zeros != half
            if not bool(bad.any()):
                continue
            slot, row, group = (int(i) for i in bad.nonzero()[0])
            name = layer.name(experts[slot], projection, packing.zero)
            mistaken = packing.other_version(zeros)
            if mistaken is not None:
                text = f"{name} and others {mistaken}; weights are symmetric, so that the zero point is {half}"
                warnings.warn(text, CheckpointWarning, stacklevel=2)
                continue
            raise CheckpointError(
                f"{name} says the zero point {int(zeros[slot, row, group])} for row {row} and group {group}, expected "
                f"{half} everywhere: weights are symmetric ({self.storage.why})"
            )

    def _pre_scale(
        self, projections: tuple[str, ...], cols: int, experts: Sequence[int], device: torch.device | str
    ) -> Tensor:
        """Read the factors of the input columns, float32 [E, cols]; 1 for projections without them."""
        layer, suffix = self.layer, self.storage.packing.pre_scale or ""
        own = [
            load_checked(
                layer, (projection,), suffix, Values.FINITE, experts=experts, device="cpu", arrange=Tensor.float
            )
            if layer.has(projection, suffix)
            else torch.ones(len(experts), cols, dtype=torch.float32, device="cpu")
            for projection in projections
        ]
        for projection, other in zip(projections[1:], own[1:], strict=True):
            if not torch.equal(other, own[0]):
                slot, column = (int(i) for i in (other != own[0]).nonzero()[0])
                module = f"{module_name(layer, projection, experts[slot])}.{suffix}"
                raise CheckpointError(
                    f"{module} is {float(other[slot, column]):g} at [{column}], expected "
                    f"{float(own[0][slot, column]):g} as {module_name(layer, projections[0], experts[slot])}.{suffix}: "
                    "projections of the same inputs must scale them alike"
                )
        return own[0].to(device)

    def _refuse_lost_weights(
        self,
        name: str,
        tensors: dict[str, Tensor],
        projections: tuple[str, ...],
        cols: int,
        experts: Sequence[int],
    ) -> None:
        """Raise CheckpointError for a zero scale over nonzero weights, which cannot be recovered."""
        scale, layer, packing = tensors[f"{name}_scale"], self.layer, self.storage.packing
        empty = scale == 0
        for slot in empty.flatten(1).any(dim=1).nonzero().flatten().tolist():
            one = slice(slot, slot + 1)
            zero, g_idx = tensors.get(f"{name}_zero_point"), tensors.get(f"{name}_g_idx")
            lost = dequantize_weight(
                tensors[name][one],
                empty[one].to(scale.dtype),
                self.weight_key,
                zero_point=None if zero is None else zero[one],
                g_idx=None if g_idx is None else g_idx[one],
                cols=cols,
            )[0]
            if not bool(lost.any()):
                continue
            row, column = (int(i) for i in lost.nonzero()[0])
            part, rows = divmod(row, lost.shape[0] // len(projections))
            if self.mixed and projections == ("gate_up",):  # row number as in the file
                is_up, pair = divmod(rows, lost.shape[0] // 2)
                rows = 2 * pair + is_up
            names = [layer.name(experts[slot], projections[part], suffix) for suffix in (packing.scale, packing.weight)]
            raise CheckpointError(
                f"{names[0]} is 0 where {names[1]} is not ({int((lost != 0).sum())} weights, first row {rows}, column "
                f"{column}): expected a scale other than 0"
            )


def _axes(shape_of: Callable[[int, int], Shape], rows: int, cols: int) -> Axes:
    """Return which dimension of ``shape_of(rows, cols)`` grows with each size, and by how much."""
    shape = shape_of(rows, cols)

    def grown(larger: Shape, size: int) -> StoredAxis | None:
        dims = [dim for dim, (few, many) in enumerate(zip(shape, larger, strict=True)) if few != many]
        return StoredAxis(dims[0], size // shape[dims[0]]) if dims else None

    return grown(shape_of(2 * rows, cols), rows), grown(shape_of(rows, 2 * cols), cols)
