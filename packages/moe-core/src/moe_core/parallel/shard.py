"""A rank's shard of a layer: some of its experts, or some columns of each expert.

The former is expert parallelism, the latter tensor parallelism; both can be combined. Tensor parallelism splits the
intermediate size: rows of gate and up, columns of w2 (:mod:`moe_core.parallel.shard_plan`). The outputs of the ranks
add up to the layer's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, check_instance
from moe_core.parallel.shard_plan import ShardPlan, default_plan, refine, shard_plans, share, slice_columns
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.weights import MoEWeights


@dataclass(frozen=True, eq=False)
class LayerShard:
    """One rank's shard of a layer.

    Attributes:
        config: Config with this rank's sizes.
        weights: This rank's weights; tensors that were split are copies.
        experts: Global ids of the local experts.
        expert_map: Local index of each expert, int32 ``[E]``; None if all experts are local.
    """

    config: FusedMoEConfig
    weights: MoEWeights
    experts: tuple[int, ...]
    expert_map: Tensor | None


def shard_layer(
    config: FusedMoEConfig,
    weights: MoEWeights,
    parallel: FusedMoEParallelConfig,
    *,
    experts: Sequence[int] | None = None,
    plan: ShardPlan | None = None,
) -> LayerShard:
    """Extract the shard of a whole layer that one rank holds.

    The outputs of the ranks add up, provided that no expert is on several of them: an all-reduce gives the layer's
    output. The bias of w2 is kept on the first tensor-parallel rank. With replicas, a placement must define which rank
    takes a token: use :meth:`moe_core.FusedMoELayer.from_weights` with ``groups`` and ``placement``.

    Args:
        config: Config of the whole layer; ``config.parallel`` must have one rank.
        weights: Canonical weights of the whole layer.
        parallel: The rank.
        experts: Global ids of this rank's experts. Default: consecutive ones. For a placement:
            ``placement.ranks[ep_rank]``.
        plan: How tensor-parallel ranks split the columns: one of :func:`moe_core.parallel.shard_plan.shard_plans` of
            this layer, the same on all ranks. Default: whole scale groups if there are enough for all ranks, otherwise
            the coarsest groups.

    Returns:
        The shard.

    Raises:
        ConfigError: The layer is already a shard, ``plan`` is for another layer, no split exists for this number of
            ranks, or there are fewer experts than ranks.
        TensorError: The weights do not fit ``config``.
    """
    check_instance("config", config, FusedMoEConfig)
    check_instance("weights", weights, MoEWeights)
    check_instance("parallel", parallel, FusedMoEParallelConfig)
    check_instance("plan", plan, ShardPlan, type(None))
    weights.validate(config)
    if config.local_experts != config.num_experts:
        raise ConfigError(
            f"num_local_experts is {config.local_experts}, expected all {config.num_experts} experts of the layer"
        )
    if config.parallel.tp_size > 1:
        raise ConfigError(
            f"the layer is shard {config.parallel.tp_rank} of tp_size {config.parallel.tp_size} with "
            f"{config.intermediate_size} columns, expected an unsharded layer (tp_size 1)"
        )
    if experts is None:
        chosen = local_expert_range(config.num_experts, parallel)
    else:
        chosen = _expert_ids(experts, config.num_experts)
    part = config
    whole = chosen == tuple(range(config.num_experts))
    if not whole:
        index = torch.tensor(chosen, dtype=torch.int64, device=weights.w13.device)
        held: dict[str, Any] = {name: tensor[index] for name, tensor in weights.tensors()}
        weights = replace(weights, **held)
        part = replace(config, num_local_experts=len(chosen))
    plans = shard_plans(config.intermediate_size, weights.weight_key, weights.activation_key, parallel.tp_size)
    plan = plan or default_plan(plans)
    if plan not in plans:
        raise ConfigError(
            f"plan is {plan}, of {len(plan.ranges)} ranks, expected one of this layer for tp_size {parallel.tp_size}: "
            f"{'; '.join(map(str, plans))}"
        )
    begin, end = plan.ranges[parallel.tp_rank]
    weights = refine(part, weights, plan.weight_key)
    weights = slice_columns(part, weights, begin, end, with_bias=parallel.tp_rank == 0)
    return LayerShard(
        config=replace(part, intermediate_size=end - begin, parallel=parallel),
        weights=replace(weights, activation_key=plan.activation_key),
        experts=chosen,
        expert_map=None if whole else map_of(chosen, config.num_experts, weights.w13.device),
    )


def _expert_ids(experts: object, num_experts: int) -> tuple[int, ...]:
    """Convert ``experts`` to integers; raise ConfigError unless they are distinct valid ids."""
    try:
        chosen = tuple(operator.index(expert) for expert in experts)  # type: ignore[attr-defined]
    except TypeError:
        chosen = ()
    if not chosen or not set(chosen) <= set(range(num_experts)) or len(set(chosen)) < len(chosen):
        shown = list(chosen)[:20] or type(experts).__name__
        raise ConfigError(f"experts is {shown}, expected distinct ids within 0..{num_experts - 1}")
    return chosen


def local_expert_range(num_experts: int, parallel: FusedMoEParallelConfig) -> tuple[int, ...]:
    """Return the global ids of a rank's consecutive experts.

    If the ranks do not divide the experts evenly, the first ranks hold one more.

    Args:
        num_experts: Number of experts of the layer.
        parallel: The rank.

    Returns:
        The ids, ascending.

    Raises:
        ConfigError: There are fewer experts than ranks.
    """
    if num_experts < parallel.ep_size:
        raise ConfigError(f"{num_experts} experts are too few for ep_size {parallel.ep_size}")
    return tuple(range(*share(num_experts, parallel.ep_size, parallel.ep_rank)))


def map_of(experts: Sequence[int], num_experts: int, device: torch.device | str) -> Tensor:
    """Build an expert map: the index of each expert among the local ones, -1 for all others.

    Args:
        experts: Global ids of the local experts, in local order.
        num_experts: Number of experts of the layer.
        device: Device of the map.

    Returns:
        int32 ``[E]``.
    """
    where = as_torch_device(device)
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=where)
    places = torch.tensor(list(experts), dtype=torch.int64, device=where)
    expert_map[places] = torch.arange(len(experts), dtype=torch.int32, device=where)
    return expert_map
