"""Models over several ranks: the experts are shared by moe-core, all else as transformers shares it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_core import ConfigError, ParallelGroups
from torch import nn

#: sizes of a DistributedConfig besides tp_size, over which experts of moe-core are not shared
_OTHERS = ("ep_size", "fsdp_size", "pp_size", "dp_replicate_size")


def groups_of(distributed: Any, given: ParallelGroups | None) -> ParallelGroups | None:
    """The ranks that share the experts: those ``given``, else of a DistributedConfig (or its entries) over which the
    rest is shared; the columns of experts are cut then.

    Raises ConfigError for what else such a config asks for, where its ranks are not those that are given, and for
    groups that share results out.
    """
    if given is not None and given.parallel.all2all_backend == "reduce_scatter":
        raise ConfigError(
            "the groups have all2all_backend 'reduce_scatter', which gives each rank a part of the tokens, and "
            "transformers' layers need all of them on each: leave it out"
        )
    if distributed is None:
        return given
    sizes = distributed if isinstance(distributed, Mapping) else vars(distributed)
    other = next((name for name in _OTHERS if (sizes.get(name) or 1) > 1), None)
    if other is not None or sizes.get("enable_expert_parallel"):
        raise ConfigError(
            f"distributed_config has {other or 'enable_expert_parallel'}, which experts of moe-core do not follow: "
            "give tp_size alone, and say by loading(groups=ParallelGroups.create(ep_size=…)) that experts are spread"
        )
    ranks = sizes.get("tp_size") or 1
    if given is None:
        return ParallelGroups.create(tp_size=ranks) if ranks > 1 else None
    if ranks not in (1, given.parallel.world_size):
        raise ConfigError(
            f"distributed_config has tp_size {ranks}, the groups are of {given.parallel.world_size} ranks: the same "
            "ranks share the experts and all else"
        )
    return given


def leave_to_moe_core(model: nn.Module, mine: Sequence[str], every: Iterable[str]) -> None:
    """Takes the experts ``mine`` out of the model's plans, so that transformers cuts nothing and adds nothing up there.

    Rules of a plan are for all layers at once ("layers.*.mlp.experts").  Raises ConfigError where they are for some of
    the experts of ``every`` block that stay transformers'.
    """
    rules = {_rule(name) for name in mine}
    others = [name for name in every if name not in mine and _rule(name) in rules]
    for attribute in ("_tp_plan", "_ep_plan"):
        plan: dict[str, str] | None = getattr(model, attribute, None)
        ours = [rule for rule in plan or () if any(rule == r or rule.startswith(f"{r}.") for r in rules)]
        if ours and others:
            raise ConfigError(
                f"{others[0]} has experts in 16 bits, which transformers runs, and {mine[0]} has quantised ones: on "
                "several ranks all are of one kind; quantise them with loading(quantize=…)"
            )
        if plan is not None:
            setattr(model, attribute, {rule: style for rule, style in plan.items() if rule not in ours})


def _rule(name: str) -> str:
    """As a plan names it: "model.layers.3.mlp.experts" is "model.layers.*.mlp.experts"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
