"""The base of formats whose tensors, once config.json is understood, are read alike for every tool.

A format says how the experts are quantised (:meth:`QuantizedFormat.storage`) and how such tensors lie
(:meth:`QuantizedFormat.layout`); finding, checking and loading them is the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.format import CheckpointFormat, Keys
from moe_core.checkpoint.matrices import ExpertMatrices, is_interleaved, unquantized_reason
from moe_core.config import FusedMoEConfig
from moe_core.errors import CheckpointError
from moe_core.quant_key import QuantKey
from moe_core.weights import MoEWeights


class ExpertLayout(Protocol):
    """How one layer's quantised matrices and their scales lie."""

    @property
    def key(self) -> QuantKey:
        """The canonical weights' key."""

    @property
    def activation(self) -> QuantKey | None:
        """The activations' key, None for 16-bit ones."""

    def check(self, projection: str, size: tuple[int, int], experts: Sequence[int], *, has_bias: bool) -> None:
        """Names, shapes and dtypes of everything that belongs to the projection, a [rows, cols] matrix.

        Raises CheckpointError that names the tensor.
        """

    def load(
        self,
        name: str,
        projections: tuple[str, ...],
        matrices: ExpertMatrices,
        experts: Sequence[int],
        device: torch.device | str,
        *,
        has_bias: bool,
    ) -> dict[str, Tensor]:
        """The canonical tensors of w13 or w2 (``name``), whose matrices lie in ``projections``, by name."""


#: what a format's config says of the tensors
Storage = TypeVar("Storage")


class QuantizedFormat(CheckpointFormat, Generic[Storage]):
    """See the module docstring.

    ``interleaved``: the layout puts gate and up rows that are stored in turns in order.
    """

    interleaved: ClassVar[bool] = False

    @abstractmethod
    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Storage | str:
        """How the tensors are quantised, or in one clause why they are not of this format.

        Raises CheckpointError for a config that is of this format and broken.
        """

    @abstractmethod
    def layout(self, storage: Storage, layer: LayerExperts) -> ExpertLayout:
        """How tensors that are so quantised lie; CheckpointError where that can't be told."""

    def reason_against(self, quantization: Mapping[str, Any], layer: LayerExperts) -> str | None:
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
        if not self.interleaved and is_interleaved(layer):
            return "gpt-oss interleaves gate and up rows, expected gate rows first"
        return None

    def keys(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Keys:
        layout = self._layout(quantization, layer)
        return layout.key, layout.activation

    def load(
        self,
        layer: LayerExperts,
        config: FusedMoEConfig,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        layout = self._layout(layer.checkpoint.quantization, layer)
        matrices = ExpertMatrices.of(layer, config)
        for projection, size in matrices.sizes.items():
            layout.check(projection, size, experts, has_bias=config.has_bias)
        tensors: dict[str, Tensor] = {}
        for name, projections in matrices.stacks:
            tensors.update(layout.load(name, projections, matrices, experts, device, has_bias=config.has_bias))
        return MoEWeights(weight_key=layout.key, activation_key=layout.activation, **tensors)

    def _layout(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout:
        found = self.storage(quantization, layer)
        if isinstance(found, str):
            raise CheckpointError(f"{layer.checkpoint.path} is not of the format {self.name}: {found}")
        return self.layout(found, layer)
