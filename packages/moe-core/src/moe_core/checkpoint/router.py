"""The tensors beside a layer's experts that choose among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_core.checkpoint.config.families import Family
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.errors import CheckpointError

# beside the experts, under the block's prefix
WEIGHTS = (
    "gate.weight",
    "router.weight",
    "router.layer.weight",
    "router.gate.weight",
    "router.classifier.weight",
    "gate.wg.weight",
)
BIASES = ("router.bias",)
CORRECTION_BIASES = (
    "gate.e_score_correction_bias",
    "e_score_correction_bias",
    "router.e_score_correction_bias",
    "router_bias",
    "moe_statics.e_score_correction_bias",
    "gate.moe_statics.e_score_correction_bias",
    "gate.expert_bias",
    "expert_bias",
    "experts.e_score_correction_bias",
)
# a correction bias where the family has one, a plain bias of the router elsewhere
AMBIGUOUS_BIASES = ("gate.bias",)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class RouterTensors:
    """Names of the router's tensors, of a family or (None) of an unknown one; None where the checkpoint has none.

    ``weight`` [E, K], ``bias`` [E], ``correction`` [E]; ``others``: what the router has besides, unless the weight is
    quantised.
    """

    def __init__(self, layer: LayerExperts, family: Family | None) -> None:
        self.layer = layer
        corrects = family is None or family.correction_bias or family.per_call is not None
        self.weight = _beside(layer, WEIGHTS)
        self.bias = _beside(layer, BIASES + (() if corrects else AMBIGUOUS_BIASES))
        self.correction = _beside(layer, CORRECTION_BIASES + (AMBIGUOUS_BIASES if corrects else ()))

    @property
    def is_quantised(self) -> bool:
        return self.weight is not None and self.layer.checkpoint.info(self.weight).dtype not in _FLOATS

    @property
    def others(self) -> tuple[str, ...]:
        if self.is_quantised or self.weight is None:
            return ()
        known = {self.weight, self.bias, self.correction}
        under = tuple(f"{self.layer.block}.{name}." for name in ("gate", "router"))
        return tuple(sorted(n for n in self.layer.checkpoint.names if n.startswith(under) and n not in known))

    def missing(self, ends: Sequence[str], why: str) -> CheckpointError:
        """What to raise where a tensor of one of these names is needed."""
        names = {f"{self.layer.block}.{end}" for end in ends}
        hint = self.layer.checkpoint.left_out(names.__contains__)
        return CheckpointError(f"{self.layer.block}.{ends[0]} is missing in {self.layer.checkpoint.path}: {why}{hint}")

    def read_weight(self, hidden_size: int, *, strict: bool = True) -> Tensor | None:
        """[E, K] in floating point, or None where there is none.

        CheckpointError for another shape; not ``strict``: None for it too.
        """
        if self.weight is None or self.is_quantised:
            return None
        info = self.layer.checkpoint.info(self.weight)
        shape = (self.layer.num_experts, hidden_size)
        if info.shape != shape:
            if not strict:
                return None
            raise CheckpointError(
                f"{self.weight} is {info}, expected {list(shape)} "
                f"(hidden size of {self.layer.checkpoint.path / 'config.json'})"
            )
        weight = self.layer.checkpoint.tensor(self.weight).clone()
        _check_finite(self.weight, weight)
        return weight

    def read_vector(self, name: str | None, *, strict: bool = True) -> Tensor | None:
        """float32 [E] of the tensor ``name`` (stored as [E] or [1, E]); ``strict`` as for :meth:`read_weight`."""
        if name is None:
            return None
        size, info = self.layer.num_experts, self.layer.checkpoint.info(name)
        if info.shape not in ((size,), (1, size)) or info.dtype not in _FLOATS:
            if not strict:
                return None
            raise CheckpointError(f"{name} is {info}, expected floating point [{size}]")
        values = self.layer.checkpoint.tensor(name).float().reshape(size).clone()
        _check_finite(name, values)
        return values


def _beside(layer: LayerExperts, names: tuple[str, ...]) -> str | None:
    return next((name for end in names if (name := f"{layer.block}.{end}") in layer.checkpoint), None)


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(f"{name} holds NaN or Inf")
