"""Read unquantized experts in 16 (or 32) bits, stored per expert or stacked.

- ``experts.<e>.gate_proj|up_proj|down_proj.weight`` [N, K] and [K, N] (also w1, w3, w2), or up and down only
- ``experts.gate_up_proj`` [E, 2N, K] (gate rows, then up rows), ``experts.down_proj`` [E, K, N]
- the same transposed, [E, K, 2N] and [E, N, K] (Llama 4, Qwen3-VL); shapes are unambiguous: 2N and N can't both be K
- gpt-oss: transposed, with interleaved gate and up (and biases ``gate_up_proj_bias`` [E, 2N])

No scheme runs these experts unquantized. They are the input of quantization at load
(:mod:`moe_core.kernels.ops.online`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_core.checkpoint.experts.checks import check_expert_tensor
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import ExpertMatrices, gate_rows_first, is_interleaved, is_transposed
from moe_core.checkpoint.experts.sliced import Axes, SlicedExperts, StoredAxis
from moe_core.checkpoint.experts.stacks import Query, load_together
from moe_core.checkpoint.experts.values import Values, checked
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.errors import CheckpointError
from moe_core.interface.checkpoint_format import CheckpointFormat, ExpertLayout
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.weights import MoEWeights

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SUFFIXES = frozenset({"weight", "bias"})


class UnquantizedFormat(CheckpointFormat):
    """Format of unquantized experts; see the module docstring.

    Only the tensors are examined, because tools leave experts unquantized without recording it in config.json.
    """

    name = "16-bit experts"

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> UnquantizedLayout | str:
        for projection in sorted(layer.projections):
            for suffix in layer.suffixes(projection):
                if suffix not in _SUFFIXES or layer.dtype(projection, suffix) not in _DTYPES:
                    stored = layer.stored_dtype(projection, suffix)
                    return f"{layer.name(0, projection, suffix)} is {stored}, expected 16-bit weights and biases alone"
            if not layer.has(projection, "weight"):
                return f"{layer.prefix} has no weight of {projection}"
        return UnquantizedLayout(layer, None, None)


class UnquantizedLayout(ExpertLayout):
    """Layout of 16-bit experts, determined from the tensors' shapes and the model family."""

    def load(self, config: FusedMoEConfig, *, experts: Sequence[int], device: torch.device | str = "cpu") -> MoEWeights:
        self.check_fits(config, experts=experts)
        return self._load(self.layer, config, experts, device)

    @property
    def column_unit(self) -> int | None:
        return 1

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
        rows, cols = StoredAxis(0), StoredAxis(1)
        axes: dict[Key, Axes] = {}
        for projection in self.layer.projections:
            axes[projection, "weight"] = (cols, rows) if is_transposed(self.layer) else (rows, cols)
            axes[projection, "bias"] = (rows, None)
        mixed = is_interleaved(self.layer)
        part = SlicedExperts.of(self.layer, axes, begin, end, config.intermediate_size, interleaved=mixed)
        return self._load(part, replace(config, intermediate_size=end - begin), experts, device)

    def check_fits(self, config: FusedMoEConfig, *, experts: Sequence[int]) -> None:
        layer = self.layer
        matrices, transposed = ExpertMatrices.of(layer, config), is_transposed(layer)
        sized = f"hidden size and intermediate size of {layer.checkpoint.path / 'config.json'}"
        for _, projections in matrices.stacks:
            # Gate and up are concatenated in one tensor and must have one dtype.
            stored = layer.dtype(projections[0], "weight")
            biased = any(layer.has(projection, "bias") for projection in projections)
            for projection in projections:
                rows, cols = matrices.sizes[projection]
                shape = (cols, rows) if transposed else (rows, cols)
                check_expert_tensor(layer, projection, "weight", shape, _DTYPES if stored is None else (stored,), sized)
                if biased:
                    check_expert_tensor(layer, projection, "bias", matrices.sizes[projection][:1], _DTYPES)

    def _load(
        self, layer: LayerExperts, config: FusedMoEConfig, experts: Sequence[int], device: torch.device | str
    ) -> MoEWeights:
        stacks = ExpertMatrices.of(layer, config).stacks
        queries = [self._stack(layer, name, projections) for name, projections in stacks]
        found = load_together(layer, queries, experts=experts, device=device)
        tensors: dict[str, Any] = {name: tensor for own in found for name, tensor in own.items()}
        return MoEWeights(weight_key=None, activation_key=None, **tensors)

    def tensor(self, name: str, config: FusedMoEConfig) -> Tensor:
        """Read one canonical tensor of all experts.

        Args:
            name: "w13", "w2", "w13_bias" or "w2_bias".
            config: Sizes of the layer.

        Returns:
            The tensor on the CPU.

        Raises:
            CheckpointError: A tensor does not fit ``config``.
        """
        self.check_fits(config, experts=range(self.layer.num_experts))
        stack, _, suffix = name.partition("_")
        projections = dict(ExpertMatrices.of(self.layer, config).stacks)[stack]
        queries = self._tensor(self.layer, projections, suffix or "weight")
        return load_together(self.layer, [queries], experts=range(self.layer.num_experts), device="cpu")[0]

    def _stack(self, layer: LayerExperts, name: str, projections: tuple[str, ...]) -> Query[dict[str, Tensor]]:
        """Request the tensors of w13 or w2 (``name``)."""
        tensors = {name: (yield from self._tensor(layer, projections, "weight"))}
        if any(layer.has(projection, "bias") for projection in projections):
            tensors[f"{name}_bias"] = yield from self._tensor(layer, projections, "bias")
        return tensors

    def _tensor(self, layer: LayerExperts, projections: tuple[str, ...], suffix: str) -> Query[Tensor]:
        """Request the weights or biases of ``projections`` in canonical order."""
        transposed = is_transposed(self.layer)
        mixed = "gate_up" in projections and is_interleaved(layer)
        arrange = partial(_weight, transposed=transposed, mixed=mixed) if transposed or mixed else None
        if suffix == "bias":
            arrange = partial(_bias, mixed=mixed)
        return (yield from checked(layer, projections, suffix, Values.FINITE, arrange=arrange))


def unquantized_tensor(layer: LayerExperts, name: str, config: FusedMoEConfig) -> Tensor:
    """Read one canonical tensor of all 16-bit experts of ``layer``.

    Args:
        layer: The experts' tensors in the checkpoint.
        name: ``"w13"``, ``"w2"``, ``"w13_bias"`` or ``"w2_bias"``.
        config: Sizes of the layer.

    Returns:
        The tensor on the CPU, laid out as in :class:`~moe_core.spec.weights.MoEWeights`.

    Raises:
        CheckpointError: The experts are not in 16 bits, or a tensor does not fit ``config``.
    """
    found = UnquantizedFormat().resolve({}, layer)
    if isinstance(found, str):
        raise CheckpointError(f"{layer.checkpoint.path}: {layer.prefix} is not read as 16-bit experts: {found}")
    return found.tensor(name, config)


def _weight(stored: Tensor, *, transposed: bool, mixed: bool) -> Tensor:
    rows = stored.mT if transposed else stored
    return gate_rows_first(rows, dim=1) if mixed else rows


def _bias(stored: Tensor, *, mixed: bool) -> Tensor:
    rows = stored.float()
    return gate_rows_first(rows, dim=1) if mixed else rows
