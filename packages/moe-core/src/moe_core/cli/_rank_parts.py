"""Shard of each rank, for the reference: its experts, its columns of them, and their groups.

Activations that enter a rank's shard of w2 are quantized from the rank's columns alone, in the rank's own groups. So
ranks compute with other numbers than a single rank with the whole layer, and neither result is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.parallel.shard import local_expert_range, map_of
from moe_core.parallel.shard_plan import ShardPlan, refine, slice_columns
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig

if TYPE_CHECKING:
    from moe_core.spec.weights import MoEWeights


def rank_parts(
    config: FusedMoEConfig,
    weights: MoEWeights,
    experts: Sequence[int],
    parallel: FusedMoEParallelConfig,
    plan: ShardPlan,
) -> Iterator[tuple[FusedMoEConfig, MoEWeights, Tensor]]:
    """Yield (config, canonical weights, expert map) of each rank that holds some of the experts.

    Args:
        config: Config of the layer with these experts and all columns.
        weights: Canonical weights of these experts with all columns.
        experts: Global ids in ascending order.
        parallel: Configuration of any of the ranks. Each rank holds consecutive experts.
        plan: How ranks split the columns.
    """
    places = {expert: place for place, expert in enumerate(experts)}
    for ep_rank in range(parallel.ep_size):
        here = replace(parallel, ep_rank=ep_rank, dp_size=1, dp_rank=0)
        held = [expert for expert in local_expert_range(config.num_experts, here) if expert in places]
        if not held:
            continue
        index = torch.tensor([places[expert] for expert in held])
        chosen: dict[str, Any] = {name: tensor[index] for name, tensor in weights.tensors()}
        part = replace(config, num_local_experts=len(held))
        whole = refine(part, replace(weights, **chosen), plan.weight_key)
        for tp_rank, (begin, end) in enumerate(plan.ranges):
            columns = slice_columns(part, whole, begin, end, with_bias=tp_rank == 0)
            yield (
                replace(part, intermediate_size=end - begin),
                replace(columns, activation_key=plan.activation_key),
                map_of(held, config.num_experts, "cpu"),
            )
