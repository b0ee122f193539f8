"""The base of all FP8 formats: a config says how the experts are quantised, the rest is the same for every tool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from moe_core import CheckpointError, FusedMoEConfig, MoEWeights
from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.format import CheckpointFormat, Keys
from moe_core.checkpoint.matrices import ExpertMatrices, unquantized_reason
from torch import Tensor

from moe_fp8.formats.fp8_layout import Fp8Layout, Fp8Storage


class Fp8Format(CheckpointFormat):
    """Base of the FP8 formats: :meth:`storage` reads the config, the rest is the same for all."""

    scheme = "fp8"

    @abstractmethod
    def storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage | str:
        """How the tensors are quantised, or in one clause why they are not of this format.

        Raises CheckpointError for a config that is of this format and broken.
        """

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
        if "gate_up" in layer.projections and layer.checkpoint.config.get("model_type") == "gpt_oss":
            return "gpt-oss interleaves gate and up rows, expected gate rows first"
        return None

    def keys(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Keys:
        storage = self._storage(quantization, layer)
        return Fp8Layout.of(storage, layer).key, storage.activation

    def load(
        self,
        layer: LayerExperts,
        config: FusedMoEConfig,
        *,
        experts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> MoEWeights:
        storage = self._storage(layer.checkpoint.quantization, layer)
        layout = Fp8Layout.of(storage, layer)
        matrices = ExpertMatrices.of(layer, config)
        for projection, size in matrices.sizes.items():
            layout.check(projection, size, experts, has_bias=config.has_bias)
        tensors: dict[str, Tensor] = {}
        for name, projections in matrices.stacks:
            tensors.update(layout.load(name, projections, matrices, experts, device, has_bias=config.has_bias))
        return MoEWeights(weight_key=layout.key, activation_key=storage.activation, **tensors)

    def _storage(self, quantization: Mapping[str, Any], layer: LayerExperts) -> Fp8Storage:
        found = self.storage(quantization, layer)
        if isinstance(found, str):
            raise CheckpointError(f"{layer.checkpoint.path} is not of the format {self.name}: {found}")
        return found
