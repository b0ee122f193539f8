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
    def apply(
        self,
        output: Tensor,
        expert_output: Tensor,
        *,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        num_local_experts: int,
        expert_map: Tensor | None,
    ) -> None:
        """Write ``output`` [M, K] from ``expert_output`` (shape: see the subclass).

        ``topk_weights`` None: the weights are applied already, only the sum is left.

        A (token, slot) whose id selects no local expert contributes nothing, whatever its row holds.
        """


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """The experts wrote the weighted sum ``[M, K]`` themselves; only a copy may be left."""

    def apply(
        self,
        output: Tensor,
        expert_output: Tensor,
        *,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        num_local_experts: int,
        expert_map: Tensor | None,
    ) -> None:
        if output.data_ptr() != expert_output.data_ptr():
            output.copy_(expert_output)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """``expert_output [M, k, K]``: one unweighted row per (token, slot)."""

    def apply(
        self,
        output: Tensor,
        expert_output: Tensor,
        *,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        num_local_experts: int,
        expert_map: Tensor | None,
    ) -> None:
        from moe_core.ops.reduce import reduce_pairs, reduce_pairs_torch

        reduce = reduce_pairs if output.device.type == "cuda" else reduce_pairs_torch
        reduce(
            expert_output.flatten(0, 1),
            topk_ids,
            num_local_experts,
            output,
            topk_weights=topk_weights,
            expert_map=expert_map,
        )


@dataclass(frozen=True, eq=False)
class Prepared:
    """What prepare hands to the experts.

    Standard format: ``hidden_states [M', K]``; batched: ``[E_local, T_max, K]`` with
    ``expert_tokens``.  ``scale`` where the hidden states were quantised.  ``expert_map`` is the one that belongs to
    ``topk_ids``: the caller's, or None where the ids are local already.  ``adapter_ids`` int32 of the rows of the
    hidden states ([M'] or [E_local, T_max]), where the call has LoRA adapters.
    """

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    scale: Tensor | None = None
    expert_tokens: ExpertTokensMetadata | None = None
    expert_map: Tensor | None = None
    adapter_ids: Tensor | None = None


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Brings hidden states to the experts (prepare) and their results back (finalize).

    ``collective``: tokens cross ranks.  Then every rank takes part in every call, also without tokens of its own, and
    what prepare hands on are not the caller's tokens in the caller's order.  ``lora``: prepare takes ``adapter_ids``.
    ``launches_only``: as of experts.
    """

    activation_format: ClassVar[FusedMoEActivationFormat]
    collective: ClassVar[bool] = False
    lora: ClassVar[bool] = False
    launches_only: ClassVar[bool] = False

    def __init__(self, config: FusedMoEConfig) -> None:
        self.config = config

    def max_tokens(self, num_tokens: int) -> int:
        """Most tokens that the experts can see when a rank brings ``num_tokens``: sizes the workspace."""
        return num_tokens

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
        adapter_ids: Tensor | None = None,
    ) -> Prepared:
        """``hidden_states [M, K]`` in the experts' format; quantised as ``quantize_as`` unless that is None.

        ``adapter_ids`` [M] int32 travel with the tokens; given only where :attr:`lora` says so.
        """

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
