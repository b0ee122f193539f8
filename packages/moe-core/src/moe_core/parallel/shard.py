"""A rank's part of a layer: some of its experts (expert parallelism), some columns of each (tensor parallelism).

Tensor parallelism cuts the intermediate size: rows of gate and up, columns of w2 (:mod:`moe_core.parallel.shard_plan`).
 The ranks' outputs add up to the layer's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError, check_instance
from moe_core.parallel.shard_plan import ColumnCut, column_cuts, cut_columns, plain_cut, refine, share
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.spec.device import as_torch_device
from moe_core.spec.weights import MoEWeights


@dataclass(frozen=True, eq=False)
class LayerShard:
    """What one rank has of a layer.

    ``config`` with this rank's sizes, ``weights`` in memory of their own where they were cut, ``experts``: global ids
    of the experts that are here, ``expert_map`` [E] int32 for the layer, None where all are.
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
    cut: ColumnCut | None = None,
) -> LayerShard:
    """The part of a whole layer that a rank of ``parallel`` holds.

    ``config`` and canonical ``weights`` are the whole layer's: ``config.parallel`` has one rank.  ``experts``: global
    ids for this rank, default consecutive ones (those of a placement: ``placement.ranks[ep_rank]``).  ``cut``: how
    tensor-parallel ranks share the columns, one of :func:`moe_core.parallel.shard_plan.column_cuts` of this layer, the
    same on all ranks; default: whole groups of scales, where they go around, else the coarsest.  The outputs of the
    ranks add up, as long as no expert is on several of them: an all-reduce gives the layer's output, w2's bias is the
    first tensor-parallel rank's.  (With replicas a placement must say which rank takes a token:
    :meth:`moe_core.FusedMoELayer.from_weights` with ``groups`` and ``placement``.)
    Raises ConfigError for a layer that is a rank's part already, for another layer's ``cut``, for ranks among which no
    cut shares the columns, and for fewer experts than ranks; TensorError for weights that don't fit ``config``.
    """
    check_instance("config", config, FusedMoEConfig)
    check_instance("weights", weights, MoEWeights)
    check_instance("parallel", parallel, FusedMoEParallelConfig)
    check_instance("cut", cut, ColumnCut, type(None))
    weights.validate(config)
    if config.local_experts != config.num_experts:
        raise ConfigError(f"the layer has {config.local_experts} of {config.num_experts} experts, expected a whole one")
    if config.parallel.tp_size > 1:
        raise ConfigError(
            f"config.parallel says that the layer is tensor-parallel rank {config.parallel.tp_rank}'s part of "
            f"{config.parallel.tp_size}, {config.intermediate_size} columns, expected a whole one (tp_size 1)"
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
    cuts = column_cuts(config.intermediate_size, weights.weight_key, weights.activation_key, parallel.tp_size)
    cut = cut or plain_cut(cuts)
    if cut not in cuts:
        raise ConfigError(
            f"cut is {cut}, of {len(cut.ranges)} ranks, expected one of this layer's for tp_size {parallel.tp_size}: "
            f"{'; '.join(map(str, cuts))}"
        )
    begin, end = cut.ranges[parallel.tp_rank]
    weights = refine(part, weights, cut.weight_key)
    weights = cut_columns(part, weights, begin, end, with_bias=parallel.tp_rank == 0)
    return LayerShard(
        config=replace(part, intermediate_size=end - begin, parallel=parallel),
        weights=replace(weights, activation_key=cut.activation_key),
        experts=chosen,
        expert_map=None if whole else map_of(chosen, config.num_experts, weights.w13.device),
    )


def _expert_ids(experts: object, num_experts: int) -> tuple[int, ...]:
    """``experts`` as plain integers.  Raises ConfigError unless these are distinct ids of the layer's experts."""
    try:
        chosen = tuple(operator.index(expert) for expert in experts)  # type: ignore[attr-defined]
    except TypeError:
        chosen = ()
    if not chosen or not set(chosen) <= set(range(num_experts)) or len(set(chosen)) < len(chosen):
        shown = list(chosen)[:20] or type(experts).__name__
        raise ConfigError(f"experts is {shown}, expected distinct ids within 0..{num_experts - 1}")
    return chosen


def local_expert_range(num_experts: int, parallel: FusedMoEParallelConfig) -> tuple[int, ...]:
    """Global ids of a rank's experts: consecutive, and one more on the first ranks where they do not divide."""
    if num_experts < parallel.ep_size:
        raise ConfigError(f"{num_experts} experts are too few for ep_size {parallel.ep_size}")
    return tuple(range(*share(num_experts, parallel.ep_size, parallel.ep_rank)))


def map_of(experts: Sequence[int], num_experts: int, device: torch.device | str) -> Tensor:
    """[E] int32: the place of each expert among the local ``experts``, -1 for the others."""
    where = as_torch_device(device)
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=where)
    places = torch.tensor(list(experts), dtype=torch.int64, device=where)
    expert_map[places] = torch.arange(len(experts), dtype=torch.int32, device=where)
    return expert_map
