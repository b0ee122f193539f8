"""Find and read the tensors of a layer's router."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_core.checkpoint.config.families import Family
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.errors import CheckpointError

# Names under the prefix of the MoE block.
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
# A correction bias for families that have one, a plain router bias for all others.
AMBIGUOUS_BIASES = ("gate.bias",)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class RouterTensors:
    """Names of the router's tensors.

    Attributes:
        layer: The layer's expert tensors.
        weight: Name of the router weight [E, K]; None if the checkpoint has none.
        bias: Name of the router bias [E]; None if the checkpoint has none.
        correction: Name of the correction bias [E]; None if the checkpoint has none.
    """

    def __init__(self, layer: LayerExperts, family: Family | None) -> None:
        self.layer = layer
        corrects = family is None or family.correction_bias or family.per_call is not None
        self.weight = _beside(layer, WEIGHTS)
        self.bias = _beside(layer, BIASES + (() if corrects else AMBIGUOUS_BIASES))
        self.correction = _beside(layer, CORRECTION_BIASES + (AMBIGUOUS_BIASES if corrects else ()))

    @property
    def is_quantized(self) -> bool:
        """Whether the router weight is stored in another dtype than bfloat16, float16 or float32."""
        return self.weight is not None and self.layer.checkpoint.info(self.weight).dtype not in _FLOATS

    @property
    def others(self) -> tuple[str, ...]:
        """The names of further router tensors; empty if the router weight is quantized or missing."""
        if self.is_quantized or self.weight is None:
            return ()
        known = {self.weight, self.bias, self.correction}
        under = tuple(f"{self.layer.block}.{name}." for name in ("gate", "router"))
        return tuple(sorted(n for n in self.layer.checkpoint.names if n.startswith(under) and n not in known))

    def missing(self, ends: Sequence[str], why: str) -> CheckpointError:
        """Return the error for a missing router tensor.

        Args:
            ends: Accepted names of the tensor under the block's prefix, the usual one first.
            why: Why the tensor is needed.

        Returns:
            The error to raise.
        """
        names = {f"{self.layer.block}.{end}" for end in ends}
        hint = self.layer.checkpoint.left_out(names.__contains__)
        return CheckpointError(f"{self.layer.block}.{ends[0]} is missing in {self.layer.checkpoint.path}: {why}{hint}")

    def read_weight(self, hidden_size: int, *, strict: bool = True) -> Tensor | None:
        """Read the router weight.

        Args:
            hidden_size: Expected K.
            strict: Whether to raise for another shape; if False, return None for it.

        Returns:
            [E, K] in the stored floating-point dtype, or None if there is no unquantized router weight.

        Raises:
            CheckpointError: The weight has another shape, or holds NaN or Inf.
        """
        if self.weight is None or self.is_quantized:
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
        """Read a bias of the router.

        Args:
            name: Name of the tensor, stored as [E] or [1, E]; None if the checkpoint has none.
            strict: Whether to raise for another shape or dtype; if False, return None for it.

        Returns:
            [E] float32, or None.

        Raises:
            CheckpointError: The tensor has another shape or is not floating point, or holds NaN or Inf.
        """
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
