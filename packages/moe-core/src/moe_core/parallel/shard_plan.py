"""Split the intermediate size of a layer among tensor-parallel ranks.

Columns that share a scale should stay together: rows of blocks of gate and up, and groups of w2 and of the activations
that enter it. If equal shards of the ranks split such groups, there are two options, neither of which changes the
values of the weights:

- *Finer groups*: a scale is repeated for sub-groups whose size divides every shard. Ranks stay equal, but a kernel must
  support such groups, and activations are quantized in groups as fine.
- *Whole groups*: some ranks get one group more than others, and all ranks wait for these.

:func:`shard_plans` lists the splits that a layer allows, most balanced first. The claims of the backends decide between
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.quant_key import GroupShape, QuantKey
from moe_core.spec.roles import BIAS, CODES, ROLES, Role, matrices
from moe_core.spec.weights import MoEWeights

#: Uneven shards are multiples of this number of columns, since GEMM tiles are no smaller.
UNEVEN = 64


@dataclass(frozen=True)
class ShardPlan:
    """A split of the columns among tensor-parallel ranks, and the resulting keys.

    Attributes:
        ranges: Columns (begin, end) of each tensor-parallel rank.
        weight_key: Key of the weights of a shard.
        activation_key: Key of the activations of a shard.
        refined: Whether scales are repeated for finer groups than the layer's own.
    """

    ranges: tuple[tuple[int, int], ...]
    weight_key: QuantKey | None
    activation_key: QuantKey | None
    refined: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Distinct numbers of columns per rank, largest first."""
        return tuple(sorted({end - begin for begin, end in self.ranges}, reverse=True))

    def __str__(self) -> str:
        shares = f"{self.sizes[0]} columns each" if len(self.sizes) == 1 else " or ".join(map(str, self.sizes[::-1]))
        if not self.refined or self.weight_key is None:
            return shares
        return f"{shares}, scales repeated for groups of {self.weight_key.group_shape}"


def shard_plans(
    size: int, weight_key: QuantKey | None, activation_key: QuantKey | None, tp_size: int
) -> tuple[ShardPlan, ...]:
    """List the ways to split the columns among ranks, most balanced first.

    They are sorted by the largest shard, then by how coarse the groups stay. If equal shards split no group, they are
    the only result.

    Args:
        size: Intermediate size of the layer, in columns.
        weight_key: Quantization of weights; None for 16 bits.
        activation_key: Quantization of activations; None for 16 bits.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        The splits.

    Raises:
        ConfigError: There is none. The message states what equal and uneven shards would be, and the next smaller
            ``tp_size`` that works.
    """
    found = _ways(size, weight_key, activation_key, tp_size)
    if not found:
        raise ConfigError(_no_way(size, weight_key, activation_key, tp_size))
    return found


def default_plan(plans: tuple[ShardPlan, ...]) -> ShardPlan:
    """Return the split closest to the layer's own keys.

    This is whole groups if possible, otherwise the coarsest; ties go to the most balanced. Most backends support it,
    since a backend that supports finer groups also supports coarser ones, down to some size.

    Args:
        plans: Splits, from :func:`shard_plans`.

    Returns:
        One of them.
    """
    return by_coarseness(plans)[0]


def by_coarseness(plans: Sequence[ShardPlan]) -> tuple[ShardPlan, ...]:
    """Sort splits: those with the layer's own keys first, then those with ever finer groups.

    Ties go to the most balanced.

    Args:
        plans: Splits, from :func:`shard_plans`.

    Returns:
        The sorted splits.
    """
    return tuple(sorted(plans, key=lambda plan: (plan.refined, *(-extent for extent in _group_extents(plan)))))


def refine(config: FusedMoEConfig, weights: MoEWeights, weight_key: QuantKey | None) -> MoEWeights:
    """Repeat scales (and zero points) for finer groups; the values of the weights are unchanged.

    Args:
        config: Config of the layer.
        weights: Weights of the layer.
        weight_key: Key with the finer groups.

    Returns:
        Weights with this key; ``weights`` itself if nothing changes.
    """
    own = weights.weight_key
    if own is None or weight_key is None or own == weight_key:
        return weights
    coarse, fine = own.group_shape, weight_key.group_shape
    changed: dict[str, Any] = {}
    for matrix, role in itertools.product(matrices(config, weight_key, weights.activation_key), ROLES):
        tensor: Tensor | None = getattr(weights, matrix.field(role))
        if tensor is None or not role.per_group:
            continue
        split = tensor.view(tensor.shape[0], matrix.parts, -1, tensor.shape[-1])
        split = _repeated(_repeated(split, 2, coarse.row, fine.row), 3, coarse.col, fine.col)
        _, rows, cols = matrix.shape(role)
        changed[matrix.field(role)] = split[:, :, : rows // matrix.parts, :cols].flatten(1, 2).contiguous()
    return replace(weights, weight_key=weight_key, **changed)


def slice_columns(config: FusedMoEConfig, weights: MoEWeights, begin: int, end: int, *, with_bias: bool) -> MoEWeights:
    """Slice a range of the intermediate columns out of a layer's weights.

    Args:
        config: Config of the layer.
        weights: Weights of the layer.
        begin: First column; must not split a scale group.
        end: Column after the last; must not split a scale group.
        with_bias: Whether the bias of w2 is kept. It is zero on all ranks but one, so that outputs add up.

    Returns:
        Weights whose split tensors are copies.
    """
    if (begin, end) == (0, config.intermediate_size) and with_bias:
        return weights
    key = weights.weight_key
    changed: dict[str, Any] = {}
    for matrix, role in itertools.product(matrices(config, key, weights.activation_key), ROLES):
        tensor: Tensor | None = getattr(weights, matrix.field(role))
        if tensor is None:
            continue
        row, col = role.extents(matrix.key(role))
        if matrix.name == "w13" and row is not None and row != -1:
            stacked = tensor.view(tensor.shape[0], matrix.parts, -1, *tensor.shape[2:])
            part = stacked[:, :, begin // row : -(-end // row)]
            changed[matrix.field(role)] = part.clone(memory_format=torch.contiguous_format).flatten(1, 2)
        elif matrix.name == "w2" and col is not None and col != -1 and not _permuted(role, key):
            part = tensor[..., begin // col : -(-end // col)]
            changed[matrix.field(role)] = part.clone(memory_format=torch.contiguous_format)
        elif matrix.name == "w2" and role is BIAS and not with_bias:
            changed[matrix.field(role)] = torch.zeros_like(tensor)
    return replace(weights, **changed)


def share(count: int, size: int, rank: int) -> tuple[int, int]:
    """Split a count evenly among ranks; the first ranks get one more if it does not divide.

    Args:
        count: Number of items.
        size: Number of ranks.
        rank: Rank.

    Returns:
        (begin, end) of the rank's items.
    """
    each, more = divmod(count, size)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def _ways(
    size: int, weight_key: QuantKey | None, activation_key: QuantKey | None, tp_size: int
) -> tuple[ShardPlan, ...]:
    """Like :func:`shard_plans`, but empty if there is no split."""
    if tp_size == 1:
        return (ShardPlan(((0, size),), weight_key, activation_key),)
    each, left = divmod(size, tp_size)
    if not left and each % _unit(weight_key, activation_key) == 0:
        return (ShardPlan(_shares(tp_size, tp_size, each, size), weight_key, activation_key),)
    # (groups must divide this, None: keep them; shards are multiples of this, None: equal shards).
    ways: list[tuple[int | None, int | None]] = [(UNEVEN, UNEVEN), (None, UNEVEN)]
    ways += [] if left else [(each, None)]
    found = []
    for divisor, step in ways:
        keys = (weight_key, activation_key)
        if divisor is not None:
            keys = _finer(weight_key, divisor), _finer(activation_key, divisor)
        unit = math.lcm(_unit(*keys), step or 1)
        if step is None and each % unit == 0:
            ranges = _shares(tp_size, tp_size, each, size)
        elif step is not None and -(-size // unit) >= tp_size:
            ranges = _shares(-(-size // unit), tp_size, unit, size)
        else:
            continue
        found.append(ShardPlan(ranges, *keys, refined=keys != (weight_key, activation_key)))
    return tuple(dict.fromkeys(sorted(found, key=lambda plan: (plan.sizes[0], plan.refined))))


def _no_way(size: int, weight_key: QuantKey | None, activation_key: QuantKey | None, tp_size: int) -> str:
    """Explain why ``tp_size`` ranks cannot split ``size`` columns, and how many fewer can."""
    each, left = divmod(size, tp_size)
    if left:
        equal = "it does not divide by that"
    else:
        together = _unit(_finer(weight_key, each), _finer(activation_key, each))
        equal = f"equal shares of {each} columns part groups of {together}"
    uneven = math.lcm(_unit(_finer(weight_key, UNEVEN), _finer(activation_key, UNEVEN)), UNEVEN)
    count = -(-size // uneven)
    # More ranks than uneven shards require equal shards.
    candidates = (ranks for ranks in range(min(tp_size - 1, size), 0, -1) if ranks <= count or size % ranks == 0)
    fits = next(ranks for ranks in candidates if _ways(size, weight_key, activation_key, ranks))
    return (
        f"tp_size {tp_size} cannot share an intermediate size of {size}: {equal}, and uneven shares are multiples of "
        f"{uneven} columns, of which it has {count}; the next smaller tp_size that can is {fits}, or spread the "
        "experts instead (ep_size)"
    )


def _group_extents(plan: ShardPlan) -> tuple[int, ...]:
    """Rows and columns of a weight group, columns of an activation group."""
    weight, activation = plan.weight_key, plan.activation_key
    shape = () if weight is None else (weight.group_shape.row, weight.group_shape.col)
    return shape if activation is None else (*shape, activation.group_shape.col)


def _shares(groups: int, tp_size: int, unit: int, size: int) -> tuple[tuple[int, int], ...]:
    """Columns of each rank, given ``groups`` of ``unit`` columns (the last may be partial)."""
    parts = (share(groups, tp_size, rank) for rank in range(tp_size))
    return tuple((unit * first, min(unit * last, size)) for first, last in parts)


def _extents(weight_key: QuantKey | None, activation_key: QuantKey | None) -> Iterator[int]:
    """Numbers of columns that share a scale or a packed word.

    These are rows of a scale group of gate and up, columns of one of w2 and of h, and values per word.
    """
    for role in ROLES:
        if not role.of_activations and (role is CODES or role.needed(weight_key)):
            row, col = role.extents(weight_key)
            yield row or 1
            yield 1 if _permuted(role, weight_key) else col or 1
    if activation_key is not None:
        yield from (scale.group_shape.col for scale in activation_key.scales)


def _permuted(role: Role, key: QuantKey | None) -> bool:
    """Whether ``g_idx`` assigns columns to the elements of a tensor: a shard then keeps all of them."""
    return role.per_group and key is not None and key.permuted


def _unit(weight_key: QuantKey | None, activation_key: QuantKey | None) -> int:
    """Smallest number of columns that must stay together."""
    return math.lcm(*itertools.chain((1,), (extent for extent in _extents(weight_key, activation_key) if extent != -1)))


def _finer(key: QuantKey | None, divisor: int) -> QuantKey | None:
    """Return the key with groups that tile ``divisor`` columns.

    Groups with 8-bit scales (OCP MX, NVFP4) keep their size, since hardware reads them.
    """
    if key is None or key.permuted:
        return key
    shape = key.group_shape
    if shape.row == 1 and key.scale.dtype.itemsize == 1:
        return key
    fine = GroupShape(*(extent if extent == -1 else math.gcd(extent, divisor) for extent in (shape.row, shape.col)))
    return key if fine == shape else key.with_group(fine.row, fine.col)


def _repeated(tensor: Tensor, dim: int, coarse: int, fine: int) -> Tensor:
    return tensor if coarse == fine else tensor.repeat_interleave(coarse // fine, dim=dim)
