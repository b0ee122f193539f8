"""Tokens and experts on one rank (or every rank holding every token, with an expert map): nothing moves."""

from __future__ import annotations

from torch import Tensor

from moe_core.config import FusedMoEActivationFormat, TokenSharing
from moe_core.prepare_finalize.base import FusedMoEPrepareAndFinalizeModular, Prepared, TopKWeightAndReduce
from moe_core.prepare_finalize.claims import PrepareFinalizeClaims
from moe_core.quant_key import QuantKey


class PrepareAndFinalizeNoParallel(FusedMoEPrepareAndFinalizeModular):
    """Standard format, no communication."""

    name = "none"
    activation_format = FusedMoEActivationFormat.STANDARD
    # ranks whose tokens are the same give partial sums, which the caller adds up
    claims = PrepareFinalizeClaims(frozenset({TokenSharing.ALL}), verified_on=("cpu", "NVIDIA H200 (sm90)"))
    lora = True
    launches_only = True

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
        scale = None
        if quantize_as is not None:
            from moe_core.ops.quantize import quantize_activation

            hidden_states, scale = quantize_activation(hidden_states, quantize_as, static_scale=static_scale)
        return Prepared(hidden_states, topk_weights, topk_ids, scale, expert_map=expert_map, adapter_ids=adapter_ids)

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
        reduce.apply(
            output,
            expert_output,
            topk_weights=None if self.config.apply_router_weight_on_input else topk_weights,
            topk_ids=topk_ids,
            num_local_experts=self.config.local_experts,
            expert_map=expert_map,
        )
