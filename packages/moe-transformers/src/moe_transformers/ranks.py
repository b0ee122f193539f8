"""Models on several ranks: moe-core shards the experts, transformers everything else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_core import ConfigError, ParallelGroups
from torch import nn

#: sizes of a DistributedConfig other than tp_size, over which moe-core's experts are not sharded
_OTHERS = ("ep_size", "fsdp_size", "pp_size", "dp_replicate_size")


def groups_of(distributed: Any, given: ParallelGroups | None) -> ParallelGroups | None:
    """Return the groups of ranks that share the experts.

    These are the ``given`` ones, else those of the DistributedConfig that shards the rest of the model. In the latter
    case the columns of experts are sharded.

    Args:
        distributed: a DistributedConfig or its entries, or None.
        given: groups of the caller, or None.

    Raises:
        ConfigError: the config requests other kinds of parallelism, its ranks differ from the given ones, or the groups
            use reduce-scatter.
    """
    if given is not None and given.parallel.all2all_backend == "reduce_scatter":
        raise ConfigError(
            "all2all_backend 'reduce_scatter' of the groups is not supported: it leaves each rank a slice of "
            "the tokens, and transformers' layers need all of them on each rank; leave it out"
        )
    if distributed is None:
        return given
    sizes = distributed if isinstance(distributed, Mapping) else vars(distributed)
    other = next((name for name in _OTHERS if (sizes.get(name) or 1) > 1), None)
    if other is not None or sizes.get("enable_expert_parallel"):
        raise ConfigError(
            f"distributed_config has {other or 'enable_expert_parallel'}, which moe-core does not support: "
            "pass tp_size alone, and loading(groups=ParallelGroups.create(ep_size=…)) for expert parallelism"
        )
    ranks = sizes.get("tp_size") or 1
    if given is None:
        return ParallelGroups.create(tp_size=ranks) if ranks > 1 else None
    if ranks not in (1, given.parallel.world_size):
        raise ConfigError(
            f"distributed_config has tp_size {ranks}, but the groups have {given.parallel.world_size} ranks; "
            "expected the same number"
        )
    return given


def leave_to_moe_core(model: nn.Module, mine: Sequence[str], every: Iterable[str]) -> None:
    """Remove experts from the model's parallel plans, so that transformers leaves them alone.

    The rules of a plan apply to all layers at once ("layers.*.mlp.experts").

    Args:
        model: model being loaded.
        mine: names of the experts modules that moe-core runs.
        every: names of all experts modules.

    Raises:
        ConfigError: a rule also covers experts that stay with transformers.
    """
    rules = {_rule(name) for name in mine}
    others = [name for name in every if name not in mine and _rule(name) in rules]
    for attribute in ("_tp_plan", "_ep_plan"):
        plan: dict[str, str] | None = getattr(model, attribute, None)
        ours = [rule for rule in plan or () if any(rule == r or rule.startswith(f"{r}.") for r in rules)]
        if ours and others:
            raise ConfigError(
                f"{others[0]} has experts in 16 bits, which transformers runs, and {mine[0]} has quantized ones: on "
                "several ranks all are of one kind; quantize them with loading(quantize=…)"
            )
        if plan is not None:
            setattr(model, attribute, {rule: style for rule, style in plan.items() if rule not in ours})


def _rule(name: str) -> str:
    """Return a plan's rule name, with "*" for layer numbers: "model.layers.*.mlp.experts"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
