"""The matrices of one layer's experts: which tensors make up w13 and w2, and what shapes config.json gives them."""

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

    ``first``: what lies below one another in w13 (``("gate", "up")``, ``("gate_up",)`` or ``("up",)``);
    ``sizes``: [rows, cols] of each projection, rows are output features.
    """

    first: tuple[str, ...]
    sizes: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(layer: LayerExperts, config: FusedMoEConfig) -> ExpertMatrices:
        """As ``config`` has them; the tensors are not looked at."""
        inter, hidden = config.intermediate_size, config.hidden_size
        if "gate_up" in layer.projections:
            return ExpertMatrices(("gate_up",), {"gate_up": (2 * inter, hidden), "down": (hidden, inter)})
        first = ("gate", "up") if layer.is_gated else ("up",)
        return ExpertMatrices(first, {**dict.fromkeys(first, (inter, hidden)), "down": (hidden, inter)})

    @property
    def stacks(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """(canonical name, projections) of both weights."""
        return (("w13", self.first), ("w2", ("down",)))


def module_name(layer: LayerExperts, projection: str, expert: int = 0) -> str:
    """Name of the linear module (``model.layers.0.mlp.experts.0.up_proj``) that owns the projection's tensors.

    Stacked tensors named ``experts.up_proj`` have no module of their own; theirs counts as one.
    """
    for suffix in layer.suffixes(projection):
        name = layer.name(expert, projection, suffix)
        for separator in (".", "_"):
            if name.endswith(separator + suffix):
                return name.removesuffix(separator + suffix)
    return layer.name(expert, projection, "weight")


def expert_modules(layer: LayerExperts) -> Iterator[tuple[int, str, str]]:
    """(expert, projection, module's name) of every linear module; of the first expert alone where they are stacked."""
    for projection in sorted(layer.projections):
        for expert in range(1 if layer.stacked_names else layer.num_experts):
            yield expert, projection, module_name(layer, projection, expert)


def stored_matrix(layer: LayerExperts, projection: str) -> tuple[int, int]:
    """Shape of one expert's weight as stored; CheckpointError where it is no matrix."""
    shape = layer.shape(projection, "weight")
    if len(shape) != 2:
        raise CheckpointError(
            f"{layer.name(0, projection, 'weight')} has shape {list(shape)}, expected a matrix per expert"
        )
    return shape[0], shape[1]


def is_transposed(layer: LayerExperts) -> bool:
    """Whether stacked gate and up are columns: [K, 2N] and [N, K], as some models keep them.

    2N and N cannot both equal K, so the shapes tell.
    """
    if "gate_up" not in layer.projections:
        return False
    (rows, cols), (down_rows, down_cols) = stored_matrix(layer, "gate_up"), stored_matrix(layer, "down")
    return (rows, cols) == (down_cols, 2 * down_rows)


def is_interleaved(layer: LayerExperts, blocks: bool = False) -> bool:
    """Whether gate and up lie in one tensor whose rows are theirs in turns: gate 0, up 0, gate 1, … (gpt-oss).

    ``blocks``: it is a tensor that gpt-oss alone is known to have, as those are that GPTQModel names
    ``experts.gate_up.<e>``.  What no family describes is a relative then; it raises CheckpointError for a model of
    another family, of which nobody says how its rows lie.
    """
    if "gate_up" not in layer.projections:
        return False
    types = list(model_types(layer.checkpoint.config))
    if "gpt_oss" in types:
        return True
    name = layer.name(0, "gate_up", layer.suffixes("gate_up")[0])
    numbered = name.startswith(f"{layer.prefix}.gate_up.")
    if not (blocks or numbered):
        return False
    relatives = (None, family_of("gpt_oss"))
    other = next((name for name in types if isinstance(name, str) and family_of(name) not in relatives), None)
    if other is not None:
        found = "gate_up.<expert>" if numbered else "gate_up_proj_blocks"
        raise CheckpointError(
            f"{layer.checkpoint.path}: {layer.prefix} has {found}, as gpt-oss, but its model_type is "
            f"{other!r}: whether gate and up rows lie in turns, as gpt-oss's, is not known"
        )
    return True


def gate_rows_first(rows: Tensor, dim: int = 0) -> Tensor:
    """``rows`` [2N, ...] of gate and up in turns (along ``dim``) as gate rows, then up rows; a copy."""
    pairs = rows.reshape(*rows.shape[:dim], -1, 2, *rows.shape[dim + 1 :])
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def unquantized_reason(layer: LayerExperts) -> str | None:
    """Why the experts count as not quantised ("its weights are BF16 without scales"), None if any tensor of them is.

    config.json has no say: tools leave experts out without telling it.
    """
    for projection in layer.projections:
        for suffix in layer.suffixes(projection):
            if suffix not in ("weight", "bias") or layer.dtype(projection, suffix) not in PLAIN_DTYPES:
                return None
        if not layer.has(projection, "weight"):
            return None
    dtypes = sorted({layer.stored_dtype(projection, "weight") for projection in layer.projections})
    return f"its weights are {' and '.join(dtypes)} without scales"
