"""The interface of prepare and finalize, and who weights and sums over top-k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moe_core.config import FusedMoEActivationFormat, FusedMoEConfig
from moe_core.experts import ExpertTokensMetadata
from moe_core.quant_key import QuantKey


class TopKWeightAndReduce(ABC):
    """Applies router weights to per-expert results and sums them per token."""

    @abstractmethod
    def apply(self, output: Tensor, expert_output: Tensor, *, topk_weights: Tensor, topk_ids: Tensor) -> None:
        """Write ``output`` [M, K] from ``expert_output`` (shape: see the subclass)."""


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """The experts wrote the weighted sum ``[M, K]`` themselves; only a copy may be left."""

    def apply(self, output: Tensor, expert_output: Tensor, *, topk_weights: Tensor, topk_ids: Tensor) -> None:
        if output.data_ptr() != expert_output.data_ptr():
            output.copy_(expert_output)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """``expert_output [M, k, K]``: one unweighted row per (token, slot)."""

    def apply(self, output: Tensor, expert_output: Tensor, *, topk_weights: Tensor, topk_ids: Tensor) -> None:
        from moe_core.ops.reduce import weighted_reduce

        weighted_reduce(expert_output, topk_weights, out=output)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What prepare hands to the experts.

    Standard format: ``hidden_states [M', K]``; batched: ``[E_local, T_max, K]`` with
    ``expert_tokens``.  ``scale`` where the hidden states were quantised.
    """

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    scale: Tensor | None = None
    expert_tokens: ExpertTokensMetadata | None = None


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Brings hidden states to the experts (prepare) and their results back (finalize)."""

    activation_format: ClassVar[FusedMoEActivationFormat]

    def __init__(self, config: FusedMoEConfig) -> None:
        self.config = config

    @abstractmethod
    def prepare(
        self,
        hidden_states: Tensor,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        quantize_as: QuantKey | None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        """``hidden_states [M, K]`` in the experts' format; quantised as ``quantize_as`` unless that is None."""

    @abstractmethod
    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        reduce: TopKWeightAndReduce,
    ) -> None:
        """Write ``output [M, K]`` from what the experts wrote."""
