"""Base classes of formats whose tensors are read in the same way for all tools.

A format interprets config.json and returns how the experts are quantized (:meth:`QuantizedFormat.storage`). That
storage describes the layout of the tensors (:meth:`ExpertStorage.layout`). Finding, checking and loading the tensors is
common to all formats.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_core.checkpoint.config.statements import names_method
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import ExpertMatrices, is_interleaved, unquantized_reason
from moe_core.checkpoint.experts.sliced import Axes, SlicedExperts, column_unit
from moe_core.checkpoint.experts.stacks import Asking, load_together
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.errors import CheckpointError, CheckpointWarning
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.weights import MoEWeights


@dataclass(frozen=True, eq=False)
class QuantizedLayout(ExpertLayout):
    """Layout of one layer's quantized matrices and scales.

    Attributes:
        weight_key: Quantization of the weights.
        storage: How the tool quantized the experts.
    """

    weight_key: QuantKey
    storage: ExpertStorage

    @property
    def sized(self) -> str:
        """The source of the matrices' sizes, for messages."""
        return f"hidden size and intermediate size of {self.layer.checkpoint.path / 'config.json'}"

    @property
    def is_static(self) -> bool:
        """Whether activations use scales from the checkpoint."""
        return self.activation_key is not None and self.activation_key.is_static

    def warn_of_unused(self, projection: str, suffix: str) -> None:
        """Warn about an activation scale that is unused according to the checkpoint's own settings.

        There is no warning if the settings use it and the caller requested other activations.

        Args:
            projection: Projection of the scale.
            suffix: Suffix of the scale's name.
        """
        if self.storage.activation is not None and self.storage.activation.is_static:
            return
        used = self.activation_key or "not quantized"
        name = self.layer.name(0, projection, suffix)
        text = f"{name} is not used: activations are {used} ({self.storage.why})"
        warnings.warn(text, CheckpointWarning, stacklevel=2)

    @abstractmethod
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

    @abstractmethod
    def stack(
        self,
        name: str,
        projections: tuple[str, ...],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> dict[str, Tensor] | Asking[dict[str, Tensor]]:
        """Build the canonical tensors of w13 or w2.

        A generator requests stored tensors with ``tensor = yield Stack(...)``; the requests of w13 and w2 are then read
        together.

        Args:
            name: "w13" or "w2".
            projections: Projections that make up the weight.
            matrices: Sizes of all projections.
            experts: Global ids of the experts.
            device: Where the tensors are allocated.
            has_bias: Whether the projections have biases.

        Returns:
            The tensors by canonical name, or a generator that returns them.
        """

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
        tensors: dict[str, Tensor] = {}
        asking: list[Asking[dict[str, Tensor]]] = []
        for name, projections in stacks:
            found = self.stack(name, projections, matrices, experts, device, has_bias=has_bias)
            if isinstance(found, dict):
                tensors |= found
            else:
                asking.append(found)
        for found in load_together(self.layer, asking, experts=experts, device=device):
            tensors |= found
        return tensors

    def axes(self, projection: str) -> Mapping[str, Axes] | None:
        """Map the matrix's rows and columns to dimensions of the stored tensors.

        Args:
            projection: One of the layer's projections.

        Returns:
            (axis of the rows, axis of the columns) by suffix, for tensors that :meth:`stack` reads. Suffixes that the
            projection lacks are ignored. Tensors that are not listed are read as a whole. None if the tensors cannot
            be read in part.
        """
        return None

    @property
    def interleaved(self) -> bool:
        """Whether gate and up rows are interleaved in one tensor."""
        return False

    @functools.cached_property
    def _axes(self) -> Mapping[Key, Axes] | None:
        found: dict[Key, Axes] = {}
        for projection in sorted(self.layer.projections):
            try:
                own = self.axes(projection)
            except CheckpointError:  # loading the whole layer reports this error
                return None
            if own is None:
                return None
            found |= {(projection, suffix): both for suffix, both in own.items() if self.layer.has(projection, suffix)}
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


class ExpertStorage(ABC):
    """Quantization of one layer's experts according to the tool's config.

    Schemes add fields for their variants.

    Attributes:
        activation: Quantization of the activations; None for 16 bits.
        why: The setting that states it, for messages ("one scale per tensor: quant_algo FP8").
        interleaved: Whether :meth:`layout` supports gate and up rows that are stored interleaved.
    """

    interleaved: ClassVar[bool] = False
    activation: QuantKey | None
    why: str

    @abstractmethod
    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        """Return the layout of tensors that are quantized in this way.

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
        if not found.interleaved and is_interleaved(layer):
            return "gpt-oss interleaves gate and up rows, expected gate rows first"
        return found.layout(layer)
