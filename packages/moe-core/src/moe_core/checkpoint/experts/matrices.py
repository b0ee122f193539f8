"""Map expert projections to w13 and w2, with the shapes that config.json implies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.checkpoint.config.families import family_of
from moe_core.checkpoint.config.keys import model_types
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.errors import CheckpointError
from moe_core.spec.config import FusedMoEConfig

PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ExpertMatrices:
    """Projections of one expert and their sizes.

    Attributes:
        first: Projections whose rows are concatenated in w13: ``("gate", "up")``, ``("gate_up",)`` or ``("up",)``.
        sizes: [rows, cols] of each projection; rows are output features.
    """

    first: tuple[str, ...]
    sizes: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(layer: LayerExperts, config: FusedMoEConfig) -> ExpertMatrices:
        """Derive the matrices from the configuration, without checking the stored tensors.

        Args:
            layer: The layer's expert tensors.
            config: Sizes of the layer.

        Returns:
            Its projections with their sizes.
        """
        inter, hidden = config.intermediate_size, config.hidden_size
        if "gate_up" in layer.projections:
            return ExpertMatrices(("gate_up",), {"gate_up": (2 * inter, hidden), "down": (hidden, inter)})
        first = ("gate", "up") if layer.is_gated else ("up",)
        return ExpertMatrices(first, {**dict.fromkeys(first, (inter, hidden)), "down": (hidden, inter)})

    @property
    def stacks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(canonical name, projections) of w13 and w2."""
        return (("w13", self.first), ("w2", ("down",)))


def module_name(layer: LayerExperts, projection: str, expert: int = 0) -> str:
    """Return the name of the linear module that owns a projection's tensors.

    Stacked tensors named ``experts.up_proj`` have no linear module; their own name is used.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.
        expert: Global id of the expert.

    Returns:
        The module's name (``model.layers.0.mlp.experts.0.up_proj``).
    """
    for suffix in layer.suffixes(projection):
        name = layer.name(expert, projection, suffix)
        for separator in (".", "_"):
            if name.endswith(separator + suffix):
                return name.removesuffix(separator + suffix)
    return layer.name(expert, projection, "weight")


def expert_modules(layer: LayerExperts) -> Iterator[tuple[int, str, str]]:
    """Yield every linear module of the experts.

    Args:
        layer: The layer's expert tensors.

    Yields:
        (expert, projection, name of the module); only those of expert 0 if experts are stored stacked.
    """
    for projection in sorted(layer.projections):
        for expert in range(1 if layer.stacked_names else layer.num_experts):
            yield expert, projection, module_name(layer, projection, expert)


def stored_matrix(layer: LayerExperts, projection: str) -> tuple[int, int]:
    """Return the stored shape of one expert's weight.

    Args:
        layer: The layer's expert tensors.
        projection: One of the layer's projections.

    Returns:
        (rows, cols) as stored.

    Raises:
        CheckpointError: The weight is not a matrix.
    """
    shape = layer.shape(projection, "weight")
    if len(shape) != 2:
        raise CheckpointError(
            f"{layer.name(0, projection, 'weight')} has shape {list(shape)}, expected a matrix per expert"
        )
    return shape[0], shape[1]


def is_transposed(layer: LayerExperts) -> bool:
    """Return whether fused weights are stored transposed: gate_up as [K, 2N] and down as [N, K].

    2N and N cannot both equal K, so the shapes are unambiguous.

    Args:
        layer: The layer's expert tensors.

    Returns:
        True if they are; False for unfused gate and up.

    Raises:
        CheckpointError: A weight is not a matrix.
    """
    if "gate_up" not in layer.projections:
        return False
    (rows, cols), (down_rows, down_cols) = stored_matrix(layer, "gate_up"), stored_matrix(layer, "down")
    return (rows, cols) == (down_cols, 2 * down_rows)


def is_interleaved(layer: LayerExperts) -> bool:
    """Return whether gate and up rows are interleaved in one tensor, as in gpt-oss.

    The order of rows is then gate 0, up 0, gate 1, …

    Some tensors are known from gpt-oss only: ``gate_up_proj_blocks``, and ``experts.gate_up.<e>`` of GPTQModel. With
    such tensors, a model of an unknown family is treated as a gpt-oss variant. For any other known family, the order
    of rows is unknown.

    Args:
        layer: The layer's expert tensors.

    Returns:
        True if the rows are interleaved.

    Raises:
        CheckpointError: A known family other than gpt-oss has tensors that are known from gpt-oss only.
    """
    if "gate_up" not in layer.projections:
        return False
    types = list(model_types(layer.checkpoint.config))
    if "gpt_oss" in types:
        return True
    name = layer.name(0, "gate_up", layer.suffixes("gate_up")[0])
    numbered = name.startswith(f"{layer.prefix}.gate_up.")
    if not (numbered or layer.has("gate_up", "blocks")):
        return False
    relatives = (None, family_of("gpt_oss"))
    other = next((name for name in types if isinstance(name, str) and family_of(name) not in relatives), None)
    if other is not None:
        found = "gate_up.<expert>" if numbered else "gate_up_proj_blocks"
        raise CheckpointError(
            f"{layer.checkpoint.path}: {layer.prefix} has {found}, as gpt-oss, but its model_type is "
            f"{other!r}: it is unknown whether gate and up rows are interleaved, as in gpt-oss"
        )
    return True


def gate_rows_first(rows: Tensor, dim: int = 0) -> Tensor:
    """Reorder interleaved gate and up rows to gate rows followed by up rows.

    Args:
        rows: [2N, ...] with gate and up rows interleaved along ``dim``.
        dim: Dimension of the rows.

    Returns:
        A copy in the new order.
    """
    pairs = rows.reshape(*rows.shape[:dim], -1, 2, *rows.shape[dim + 1 :])
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def unquantized_reason(layer: LayerExperts) -> str | None:
    """Return why the experts count as unquantized ("its weights are BF16 without scales").

    config.json is ignored, because tools leave experts unquantized without recording it there.

    Args:
        layer: The layer's expert tensors.

    Returns:
        The reason, or None if any of their tensors is quantized.
    """
    for projection in layer.projections:
        for suffix in layer.suffixes(projection):
            if suffix not in ("weight", "bias") or layer.dtype(projection, suffix) not in PLAIN_DTYPES:
                return None
        if not layer.has(projection, "weight"):
            return None
    dtypes = sorted({layer.stored_dtype(projection, "weight") for projection in layer.projections})
    return f"its weights are {' and '.join(dtypes)} without scales"
