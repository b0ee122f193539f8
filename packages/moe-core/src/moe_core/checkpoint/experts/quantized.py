"""The base of formats whose tensors, once config.json is understood, are read alike for every tool.

A format says how the experts are quantised (:meth:`QuantizedFormat.storage`), and what it says knows how such tensors
lie (:meth:`ExpertStorage.layout`); finding, checking and loading them is the same for all.
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
    """How one layer's quantised matrices and their scales lie.  ``storage``: how they are quantised."""

    weight_key: QuantKey
    storage: ExpertStorage

    @property
    def sized(self) -> str:
        """Where sizes of matrices are said, for messages."""
        return f"hidden size and intermediate size of {self.layer.checkpoint.path / 'config.json'}"

    @property
    def is_static(self) -> bool:
        """Whether activations have scales in the checkpoint."""
        return self.activation_key is not None and self.activation_key.is_static

    def warn_of_unused(self, projection: str, suffix: str) -> None:
        """CheckpointWarning of an activation scale that the checkpoint's settings have no use for.

        None where they do, and other activations were asked for.
        """
        if self.storage.activation is not None and self.storage.activation.is_static:
            return
        used = self.activation_key or "not quantised"
        name = self.layer.name(0, projection, suffix)
        text = f"{name} is not used: activations are {used} ({self.storage.why})"
        warnings.warn(text, CheckpointWarning, stacklevel=2)

    @abstractmethod
    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        """Names, shapes and dtypes of everything that belongs to the projection, a [rows, cols] matrix.

        Raises CheckpointError that names the tensor.
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
        """The canonical tensors of w13 or w2 (``name``), whose matrices lie in ``projections``, by name.

        As a generator it asks for them (``tensor = yield Stack(...)``): what w13 and w2 ask for is read together.
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
        """What :meth:`stack` gives for each name and its projections, all of them together."""
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
        """Where rows and columns of the matrix lie in each tensor that :meth:`stack` reads, by suffix.

        Of suffixes that the projection does not have nothing need be said; a tensor that is left out is read whole.
        None where the tensors cannot be read in part.
        """
        return None

    @property
    def interleaved(self) -> bool:
        """Whether rows of gate and up in one tensor are theirs in turns."""
        return False

    @functools.cached_property
    def _axes(self) -> Mapping[Key, Axes] | None:
        found: dict[Key, Axes] = {}
        for projection in sorted(self.layer.projections):
            try:
                own = self.axes(projection)
            except CheckpointError:  # which loading the whole layer names as what it is
                return None
            if own is None:
                return None
            found |= {(projection, suffix): both for suffix, both in own.items() if self.layer.has(projection, suffix)}
        return found

    @property
    def column_unit(self) -> int | None:
        return None if self._axes is None else column_unit(self.layer, self._axes, interleaved=self.interleaved)

    def columns_of(self, begin: int, end: int, size: int) -> QuantizedLayout:
        """The layout of these columns of the intermediate ``size`` alone."""
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
    """How one layer's experts are quantised, as their tool's config says; a scheme adds what its kinds differ in.

    - ``activation``: key of the activations, None for 16-bit ones
    - ``why``: where that is said, for messages ("one scale per tensor: quant_algo FP8")
    - ``interleaved``: :meth:`layout` puts gate and up rows that are stored in turns in order
    """

    interleaved: ClassVar[bool] = False
    activation: QuantKey | None
    why: str

    @abstractmethod
    def layout(self, layer: LayerExperts) -> QuantizedLayout:
        """How tensors that are so quantised lie; CheckpointError where that can't be told."""


class QuantizedFormat(CheckpointFormat):
    """See the module docstring.  ``quant_methods``: all that it reads, the usual one first."""

    @abstractmethod
    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertStorage | str:
        """How the tensors are quantised, or in one clause why they are not of this format.

        Asked where ``quant_method`` is one of the format's.  Raises CheckpointError for a config that is of this format
        and broken.
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
