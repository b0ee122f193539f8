"""Read quantized experts by a table of their tensors.

A format interprets config.json and returns how the experts are quantized (:meth:`QuantizedFormat.storage`). That
storage returns a layout with the table (:meth:`ExpertStorage.layout`). Finding, checking, slicing and loading the
tensors is common to all formats.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.config.statements import names_method
from moe_core.checkpoint.experts.checks import check_expert_tensor
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import (
    PLAIN_DTYPES,
    ExpertMatrices,
    gate_rows_first,
    is_interleaved,
    unquantized_reason,
)
from moe_core.checkpoint.experts.rules import COMMON, Matrix, Shape, TensorRule
from moe_core.checkpoint.experts.sliced import Axes, SlicedExperts, StoredAxis, column_unit
from moe_core.checkpoint.experts.stacks import Query, load_together
from moe_core.checkpoint.experts.suffixes import (
    INPUT_SCALES,
    ZERO_POINTS,
    check_stated_shape,
    missing,
    one_suffix,
    refuse_zero_points,
)
from moe_core.checkpoint.experts.values import checked, refuse_lost_weights
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.errors import CheckpointError, CheckpointWarning
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights

#: Multiple of the number of codes in any word, from which the axes of stored tensors are derived.
_MANY = 64


@dataclass(frozen=True, eq=False)
class QuantizedLayout(ExpertLayout):
    """Layout of one layer's quantized matrices and scales, given by a table.

    Attributes:
        weight_key: Quantization of the weights.
        storage: How the tool quantized the experts.
        rules: The table; rows for biases and static activation scales are added.
        interleaved: Whether gate and up rows are interleaved in one tensor.
        whole: Whether the layer can only be read as a whole.
    """

    weight_key: QuantKey
    storage: ExpertStorage
    rules: tuple[TensorRule, ...]
    interleaved: bool = False
    whole: bool = False

    @property
    def sized(self) -> str:
        """The source of the matrices' sizes, for messages."""
        return f"hidden size and intermediate size of {self.layer.checkpoint.path / 'config.json'}"

    @functools.cached_property
    def _by_role(self) -> Mapping[str, Sequence[TensorRule]]:
        found: dict[str, list[TensorRule]] = {}
        for rule in (*self.rules, *COMMON):
            found.setdefault(rule.role, []).append(rule)
        return found

    def _roles(self, has_bias: bool) -> list[str]:
        """Return the roles of tensors that determine the layer's values."""
        key = self.activation_key
        static = key is not None and key.is_static
        unused = {"bias": not has_bias, "input_scale": not static}
        unused["input_zero_point"] = key is None or not static or key.symmetric
        return [role for role in self._by_role if not unused.get(role)]

    def find(self, projection: str, role: str) -> tuple[TensorRule, str] | None:
        """Return the row of the table that a projection's tensor has, and its suffix.

        Args:
            projection: One of the layer's projections.
            role: Role of the tensor.

        Returns:
            (row, suffix); None if the projection has no such tensor.

        Raises:
            CheckpointError: The projection has two tensors of this role.
        """
        rules = self._by_role.get(role, ())
        suffix = one_suffix(self.layer, projection, list(dict.fromkeys(s for rule in rules for s in rule.suffixes)))
        if suffix is None:
            return None
        dtype = self.layer.dtype(projection, suffix)
        named = [rule for rule in rules if suffix in rule.suffixes]
        return next((rule for rule in named if dtype in rule.dtypes), named[0]), suffix

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        """Check names, shapes and dtypes of all tensors of a projection.

        Args:
            projection: One of the layer's projections.
            size: [rows, cols] of the matrix.
            experts: Global ids of the experts.
            has_bias: Whether the projection must have a bias.

        Raises:
            CheckpointError: A tensor is missing or has the wrong shape or dtype; the message names it.
        """
        layer, matrix = self.layer, Matrix((projection,), *size)
        reason = f"{self.storage.why}; {self.sized}"
        self._refuse_unquantized(projection)
        used: set[str] = set()
        for role in self._roles(has_bias):
            found, others = self.find(projection, role), self._stacked_with(projection, role)
            if found is None:
                if others or any(rule.required for rule in self._by_role[role]):
                    raise CheckpointError(f"{missing(layer, projection, self._usual(role))} ({reason})")
                continue
            rule, suffix = found
            used.add(suffix)
            unlike = next((name for other, name in others if other is not rule), None)
            if unlike is not None:
                raise CheckpointError(
                    f"{layer.prefix} has {' and '.join(sorted((suffix, unlike)))}: all matrices of a layer's experts "
                    "must be stored alike"
                )
            for number, multiple, what in zip(size, rule.multiple, ("rows", "columns"), strict=True):
                if number % multiple:
                    name = layer.name(0, projection, suffix)
                    raise CheckpointError(f"{name} has {number} {what}, expected a multiple of {multiple} ({reason})")
            shape, *also = rule.shape(matrix)
            dtypes = [dtype for row in self._by_role[role] if suffix in row.suffixes for dtype in row.dtypes]
            check_expert_tensor(layer, projection, suffix, shape, dtypes, rule.why or reason, also=also)
        for suffix in layer.suffixes(projection):
            if suffix not in used:
                self._check_other(projection, suffix, size, experts)

    def _stacked_with(self, projection: str, role: str) -> list[tuple[TensorRule, str]]:
        """Return :meth:`find` of projections whose tensors must be stored alike: gate and up, or all for the codes."""
        alike = self.layer.projections if role == "weight" else self.layer.projections - {"down"}
        others = sorted(alike - {projection}) if projection in alike else []
        found = [(other, pair) for other in others if (pair := self.find(other, role)) is not None]
        return [pair for other, pair in found if self.layer.dtype(other, pair[1]) in pair[0].dtypes]

    def _usual(self, role: str) -> str:
        """Return the suffix that any projection has for a role, or the usual one."""
        found = (self.find(projection, role) for projection in sorted(self.layer.projections))
        return next((one[1] for one in found if one is not None), self._by_role[role][0].suffixes[0])

    def _refuse_unquantized(self, projection: str) -> None:
        """Refuse a projection in 16 bits next to quantized ones.

        Tools leave matrices unquantized if their sizes are not divisible into groups.
        """
        layer = self.layer
        if not layer.has(projection, "weight") or layer.dtype(projection, "weight") not in PLAIN_DTYPES:
            return
        for other in sorted(layer.projections):
            found = self.find(other, "weight")
            if found is not None and (dtype := layer.dtype(other, found[1])) in found[0].dtypes:
                stored = str(layer.dtype(projection, "weight")).removeprefix("torch.")
                raise CheckpointError(
                    f"{layer.name(0, projection, 'weight')} has dtype {stored}, expected "
                    f"{str(dtype).removeprefix('torch.')} as {layer.name(0, other, found[1])}: all matrices of a "
                    "layer's experts must be quantized alike"
                )

    def _check_other(self, projection: str, suffix: str, size: tuple[int, int], experts: Sequence[int]) -> None:
        """Refuse a tensor outside the table unless it has no effect."""
        layer, name = self.layer, self.layer.name(0, projection, suffix)
        if suffix in self.storage.refused:
            raise CheckpointError(f"{name} {self.storage.refused[suffix]}")
        if suffix in INPUT_SCALES:
            self._warn_of_unused(name)
        elif suffix in ZERO_POINTS:
            refuse_zero_points(layer, projection, suffix, experts)
        elif suffix == "weight_shape":
            check_stated_shape(layer, projection, size, experts)
        else:
            kind = layer.stored_dtype(projection, suffix)
            raise CheckpointError(f"{name} is {kind}: experts of this format have no such tensor ({self.storage.why})")

    def _warn_of_unused(self, name: str) -> None:
        """Warn about an activation scale that is unused according to the checkpoint's own settings.

        It does not warn if the settings use the tensor and the caller requested other activations.
        """
        if self.storage.activation is None or not self.storage.activation.is_static:
            used = self.activation_key or "not quantized"
            text = f"{name} is not used: activations are {used} ({self.storage.why})"
            warnings.warn(text, CheckpointWarning, stacklevel=2)

    def stack(
        self,
        name: str,
        projections: tuple[str, ...],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> Query[dict[str, Tensor]]:
        """Build the canonical tensors of w13 or w2; the requests of both are read together.

        Args:
            name: "w13" or "w2".
            projections: Projections that make up the weight.
            matrices: Sizes of all projections.
            experts: Global ids of the experts.
            device: Where the tensors are allocated.
            has_bias: Whether the projections have biases.

        Returns:
            Generator of requests that returns the tensors by canonical name.
        """
        matrix = Matrix(projections, *matrices.sizes[projections[0]])
        tensors: dict[str, Tensor] = {}
        suffixes: dict[str, str] = {}
        for role in self._roles(has_bias):
            found = self.find(projections[0], role)
            if found is None or not found[0].read:
                continue
            rule, suffixes[role] = found
            arrange = self._arrange(rule, matrix)
            tensors[role] = yield from checked(self.layer, projections, suffixes[role], rule.values, arrange=arrange)
        self.finish(tensors, matrix, experts, device)
        if "scale" in tensors and tensors["scale"].dtype.is_floating_point:
            refuse_lost_weights(
                self.layer,
                projections,
                (suffixes["weight"], suffixes["scale"]),
                tensors,
                self.weight_key,
                experts=experts,
                cols=matrix.cols,
                interleaved=self.interleaved,
            )
        return {name if role == "weight" else f"{name}_{role}": tensor for role, tensor in tensors.items()}

    def _arrange(self, rule: TensorRule, matrix: Matrix) -> Callable[[Tensor], Tensor] | None:
        """Return how stored tensors become canonical ones; None if they already are."""
        mixed = self.interleaved and matrix.is_fused and rule.by_rows
        if rule.arrange is None and not rule.reciprocal and not mixed:
            return None

        def arranged(stored: Tensor) -> Tensor:
            values = stored if rule.arrange is None else rule.arrange(stored, matrix)
            values = values.reciprocal() if rule.reciprocal else values
            return gate_rows_first(values, dim=1) if mixed else values

        return arranged

    def finish(
        self, tensors: dict[str, Tensor], matrix: Matrix, experts: Sequence[int], device: torch.device | str
    ) -> None:
        """Complete the canonical tensors of w13 or w2 in place.

        Gate and up read the same activations. If their static activation scales differ, the maximum is used, since it
        is the only one of the two with which neither clips.

        Args:
            tensors: Canonical tensors by role.
            matrix: The projections and their size.
            experts: Global ids of the experts.
            device: Device of the tensors.
        """
        if "input_scale" in tensors:
            tensors["input_scale"] = tensors["input_scale"].amax(dim=1)

    def stacked(
        self,
        stacks: Iterable[tuple[str, tuple[str, ...]]],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> dict[str, Tensor]:
        """Build the canonical tensors of several weights, reading their stored tensors together.

        Args:
            stacks: (name, projections) of each weight, as for :meth:`stack`.
            matrices: Sizes of all projections.
            experts: Global ids of the experts.
            device: Where the tensors are allocated.
            has_bias: Whether the projections have biases.

        Returns:
            The tensors by canonical name.
        """
        queries = [self.stack(name, own, matrices, experts, device, has_bias=has_bias) for name, own in stacks]
        tensors: dict[str, Tensor] = {}
        for found in load_together(self.layer, queries, experts=experts, device=device):
            tensors |= found
        return tensors

    def _stored_axes(self, projection: str) -> dict[str, Axes]:
        """Map the matrix's rows and columns to dimensions of the stored tensors, by suffix.

        Tensors that are not listed are read as a whole.
        """
        group, axes = self.weight_key.group_shape, dict[str, Axes]()
        rows, cols = _MANY * max(group.row, 1), _MANY * max(group.col, 1)
        for role in self._by_role:
            found = self.find(projection, role)
            if found is None:
                continue
            rule, suffix = found
            shape, taller, wider = (
                self._shape(rule, projection, suffix, *size)
                for size in ((rows, cols), (2 * rows, cols), (rows, 2 * cols))
            )
            axes[suffix] = (
                _axis(shape, taller, rows, rule.separate) if "rows" in rule.sliced else None,
                _axis(shape, wider, cols) if "columns" in rule.sliced else None,
            )
        return axes

    def _shape(self, rule: TensorRule, projection: str, suffix: str, rows: int, cols: int) -> Shape:
        """Return the shape of a tensor for another size of the matrix, in the variant that the file has."""
        shapes, dims = rule.shape(Matrix((projection,), rows, cols)), len(self.layer.shape(projection, suffix))
        return next((shape for shape in shapes if len(shape) == dims), shapes[0])

    @functools.cached_property
    def _axes(self) -> Mapping[Key, Axes] | None:
        if self.whole:
            return None
        found: dict[Key, Axes] = {}
        for projection in sorted(self.layer.projections):
            try:
                own = self._stored_axes(projection)
            except CheckpointError:  # loading the whole layer reports this error
                return None
            found |= {(projection, suffix): both for suffix, both in own.items()}
        return found

    @property
    def column_unit(self) -> int | None:
        return None if self._axes is None else column_unit(self.layer, self._axes, interleaved=self.interleaved)

    def columns_of(self, begin: int, end: int, size: int) -> QuantizedLayout:
        """Return the layout restricted to some columns of the intermediate size.

        Args:
            begin: First column; a multiple of ``column_unit``.
            end: End of the columns; a multiple of ``column_unit``, or ``size``.
            size: The intermediate size of the whole layer.

        Returns:
            A layout that reads only these columns.
        """
        layer = SlicedExperts.of(self.layer, self._axes or {}, begin, end, size, interleaved=self.interleaved)
        return replace(self, layer=layer)

    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        self.check_fits(config, experts=experts)
        return self._load(config, experts, device)

    def load_columns(
        self,
        config: FusedMoEConfig,
        begin: int,
        end: int,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        self.check_fits(config, experts=experts)
        part = self.columns_of(begin, end, config.intermediate_size)
        return part._load(replace(config, intermediate_size=end - begin), experts, device)

    def check_fits(self, config: FusedMoEConfig, *, experts: Sequence[int]) -> None:
        for projection, size in ExpertMatrices.of(self.layer, config).sizes.items():
            self.check(projection, size, experts, has_bias=config.has_bias)

    def _load(self, config: FusedMoEConfig, experts: Sequence[int], device: torch.device | str) -> MoEWeights:
        matrices = ExpertMatrices.of(self.layer, config)
        tensors: dict[str, Any] = self.stacked(matrices.stacks, matrices, experts, device, has_bias=config.has_bias)
        return MoEWeights(weight_key=self.weight_key, activation_key=self.activation_key, **tensors)


def _axis(shape: Shape, larger: Shape, size: int, separate: bool = False) -> StoredAxis | None:
    """Return which dimension grows if ``size`` doubles, and how many rows or columns an entry covers."""
    dims = [dim for dim, (few, many) in enumerate(zip(shape, larger, strict=True)) if few != many]
    return StoredAxis(dims[0], size // shape[dims[0]], separate) if dims else None


class ExpertStorage(ABC):
    """Quantization of one layer's experts according to the tool's config.

    Schemes add fields for their variants.

    Attributes:
        activation: Quantization of the activations; None for 16 bits.
        why: The setting that states it, for messages ("one scale per tensor: quant_algo FP8").
        supports_interleaved: Whether :meth:`layout` supports gate and up rows that are stored interleaved.
        refused: Suffixes of tensors that are refused, with the reason.
    """

    supports_interleaved: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {}
    activation: QuantKey | None
    why: str

    @abstractmethod
    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        """Return the layout of tensors that are quantized in this way: their key and their table.

        Args:
            layer: The layer's expert tensors.

        Returns:
            The layout.

        Raises:
            CheckpointError: The layout cannot be determined.
        """


class QuantizedFormat(CheckpointFormat):
    """Base class of formats that interpret a tool's config; see the module docstring.

    ``quant_methods`` lists all methods that the format reads, the most common one first.
    """

    @abstractmethod
    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertStorage | str:
        """Interpret the tool's config for a layer.

        This is called if ``quant_method`` is one of the format's methods.

        Args:
            quantization: Quantization settings of the checkpoint.
            layer: The layer's expert tensors.

        Returns:
            How the tensors are quantized, or, as one clause, why they do not have this format.

        Raises:
            CheckpointError: The config has this format but is invalid.
        """

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> QuantizedLayout | str:
        method = quantization.get("quant_method")
        if not names_method(self.quant_methods, method):
            return f"quant_method is {method!r}, expected {self.quant_methods[0]!r}"
        plain = unquantized_reason(layer)
        try:
            found = self.storage(quantization, layer)
        except CheckpointError:
            if plain is None:
                raise
            return plain
        if isinstance(found, str):
            return found
        if plain is not None:
            return plain
        if not found.supports_interleaved and is_interleaved(layer):
            return "gpt-oss interleaves gate and up rows, expected gate rows first"
        return found.layout(layer)
