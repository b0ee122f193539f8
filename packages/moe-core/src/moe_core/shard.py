"""A rank's part of a layer: some of its experts (expert parallelism), some columns of each (tensor parallelism).

Tensor parallelism cuts the intermediate size: rows of gate and up, columns of w2.  The ranks' outputs add up to the
layer's.  What is cut are whole groups of scales, so that every rank computes with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.device import as_torch_device
from moe_core.errors import ConfigError
from moe_core.quant_key import QuantKey
from moe_core.weights import MoEWeights

#: columns of a rank where the intermediate size does not divide: tiles of GEMMs are no smaller
UNEVEN = 64


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
) -> LayerShard:
    """The part of a whole layer that a rank of ``parallel`` holds.

    ``config`` and canonical ``weights`` are the whole layer's.  ``experts``: global ids for this rank, default
    consecutive ones.  The outputs of the ranks add up: an all-reduce over them gives the layer's output, w2's bias is
    the first tensor-parallel rank's.  Raises ConfigError where there are fewer groups of columns, or experts, than
    ranks; TensorError for weights that don't fit ``config``.
    """
    weights.validate(config)
    if config.local_experts != config.num_experts:
        raise ConfigError(f"the layer has {config.local_experts} of {config.num_experts} experts, expected a whole one")
    chosen = local_expert_range(config.num_experts, parallel) if experts is None else tuple(experts)
    if experts is not None and not (chosen and set(chosen) <= set(range(config.num_experts))):
        raise ConfigError(f"experts is {list(chosen)[:20]}, expected ids within 0..{config.num_experts - 1}")
    part = config
    whole = chosen == tuple(range(config.num_experts))
    if not whole:
        index = torch.tensor(chosen, device=weights.w13.device)
        held: dict[str, Any] = {name: tensor[index] for name, tensor in weights.tensors()}
        weights = replace(weights, **held)
        part = replace(config, num_local_experts=len(chosen))
    cut, weights = cut_columns(part, weights, parallel)
    return LayerShard(
        config=replace(cut, parallel=parallel),
        weights=weights,
        experts=chosen,
        expert_map=None if whole else map_of(chosen, config.num_experts, weights.w13.device),
    )


def local_expert_range(num_experts: int, parallel: FusedMoEParallelConfig) -> tuple[int, ...]:
    """Global ids of a rank's experts: consecutive, and one more on the first ranks where they do not divide."""
    if num_experts < parallel.ep_size:
        raise ConfigError(f"{num_experts} experts are too few for ep_size {parallel.ep_size}")
    return tuple(range(*_share(num_experts, parallel.ep_size, parallel.ep_rank)))


def map_of(experts: Sequence[int], num_experts: int, device: torch.device | str) -> Tensor:
    """[E] int32: the place of each expert among the local ``experts``, -1 for the others."""
    where = as_torch_device(device)
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=where)
    expert_map[torch.tensor(list(experts), device=where)] = torch.arange(len(experts), dtype=torch.int32, device=where)
    return expert_map


def column_range(
    size: int, weight_key: QuantKey | None, activation_key: QuantKey | None, parallel: FusedMoEParallelConfig
) -> tuple[int, int]:
    """(begin, end) of the columns of a layer of intermediate ``size`` that a rank computes: whole groups of scales."""
    if parallel.tp_size == 1:
        return 0, size
    unit = _unit(weight_key, activation_key)
    if size % (unit * parallel.tp_size) == 0:
        each = size // parallel.tp_size
        return parallel.tp_rank * each, (parallel.tp_rank + 1) * each
    unit = math.lcm(unit, UNEVEN)
    groups = -(-size // unit)
    if groups < parallel.tp_size:
        raise ConfigError(
            f"an intermediate size of {size} has {groups} groups of {unit} columns, too few for tp_size "
            f"{parallel.tp_size}: spread the experts instead (ep_size)"
        )
    start, stop = _share(groups, parallel.tp_size, parallel.tp_rank)
    return unit * start, min(unit * stop, size)


def cut_columns(
    config: FusedMoEConfig, weights: MoEWeights, parallel: FusedMoEParallelConfig
) -> tuple[FusedMoEConfig, MoEWeights]:
    """The config and the weights of a tensor-parallel rank, of those of all columns."""
    if parallel.tp_size == 1:
        return config, weights
    key, size = weights.weight_key, config.intermediate_size
    start, stop = column_range(size, key, weights.activation_key, parallel)
    parts = 2 if config.is_gated else 1

    def rows(tensor: Tensor, begin: int, end: int) -> Tensor:
        """These rows of gate and up, [E, parts * rows, ...]."""
        split = tensor.view(tensor.shape[0], parts, -1, *tensor.shape[2:])
        return split[:, :, begin:end].clone(memory_format=torch.contiguous_format).flatten(1, 2)

    def columns(tensor: Tensor, begin: int, end: int) -> Tensor:
        return tensor[..., begin:end].clone(memory_format=torch.contiguous_format)

    per_word = 1 if key is None or key.packing is None else key.packing.values_per_word
    cut: dict[str, Any] = {
        "w13": rows(weights.w13, start, stop),
        "w2": columns(weights.w2, start // per_word, -(-stop // per_word)),
    }
    row, col = (-1, -1) if key is None else (key.group_shape.row, key.group_shape.col)
    for name, tensor in weights.tensors():
        if name in ("w13_scale", "w13_zero_point") and row != -1:
            cut[name] = rows(tensor, start // row, -(-stop // row))
        elif name in ("w2_scale", "w2_zero_point") and col != -1 and not (key is not None and key.permuted):
            cut[name] = columns(tensor, start // col, -(-stop // col))
        elif name == "w13_bias":
            cut[name] = rows(tensor, start, stop)
        elif name in ("w2_g_idx", "w2_pre_scale"):
            cut[name] = columns(tensor, start, stop)
        elif name == "w2_bias" and parallel.tp_rank:
            cut[name] = torch.zeros_like(tensor)
    return replace(config, intermediate_size=stop - start), replace(weights, **cut)


def _unit(weight_key: QuantKey | None, activation_key: QuantKey | None) -> int:
    """Columns that stay together: a row of scale groups of gate and up, a column of those of w2 and h, a word."""
    extents = [1]
    if weight_key is not None:
        extents.append(weight_key.group_shape.row)
        extents.append(1 if weight_key.permuted else weight_key.group_shape.col)
        extents.append(1 if weight_key.packing is None else weight_key.packing.values_per_word)
    if activation_key is not None:
        extents.append(activation_key.group_shape.col)
    return math.lcm(*(extent for extent in extents if extent != -1))


def _share(count: int, size: int, rank: int) -> tuple[int, int]:
    """(begin, end) of ``rank``'s share of ``count`` things; the first ranks have one more where they do not divide."""
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)
