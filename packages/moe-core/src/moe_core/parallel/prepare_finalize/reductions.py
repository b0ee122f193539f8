"""Weighting and summing of a token's expert rows after the experts."""

from __future__ import annotations

from torch import Tensor

from moe_core.interface.prepare_finalize import TokenRouting, TopKWeightAndReduce
from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch
from moe_core.spec.config import FusedMoEConfig


class TopKWeightAndReduceNoOP(TopKWeightAndReduce):
    """No reduction: the experts wrote the weighted sum ``[M, K]``; at most a copy remains."""

    def apply(self, output: Tensor, expert_output: Tensor, routing: TokenRouting, config: FusedMoEConfig) -> None:
        if output.data_ptr() != expert_output.data_ptr():
            output.copy_(expert_output)


class TopKWeightAndReduceContiguous(TopKWeightAndReduce):
    """Reduction of ``expert_output`` ``[M, k, K]``, one unweighted row per (token, expert) pair."""

    def apply(self, output: Tensor, expert_output: Tensor, routing: TokenRouting, config: FusedMoEConfig) -> None:
        reduce = reduce_pairs if output.device.type == "cuda" else reduce_pairs_torch
        reduce(
            expert_output.flatten(0, 1),
            routing.topk_ids,
            config.local_experts,
            output,
            topk_weights=None if config.apply_router_weight_on_input else routing.topk_weights,
            expert_map=routing.expert_map,
        )
