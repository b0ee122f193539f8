"""What compressed-tensors' ``quantization_config`` says of one layer's experts.

A config has groups; each names its targets (modules by name, ``re:`` pattern or class) and how their weights and
input activations are quantised.  ``ignore`` is not looked at: tools write lists that don't fit their files, so whether
a layer is quantised is read off its tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.matrices import module_name
from moe_core.checkpoint.quant_args import QuantEntries, short
from moe_core.errors import CheckpointError

#: longer patterns are refused before they are compiled
_LONGEST_PATTERN = 1000


@dataclass(frozen=True)
class QuantArgs:
    """How one operand is quantised.

    ``strategy``: tensor, channel, group, block, token (or what else the file says); ``group_size`` along K;
    ``block`` [rows, columns]; ``dynamic``: scales are computed at run time (True), come with the file (False), or both
    ("local"); ``scale_dtype`` as written ("torch.uint8" for e8m0) or None.
    """

    type: str
    num_bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool | str
    actorder: str | None
    scale_dtype: str | None
    where: str

    def __str__(self) -> str:
        size = self.block or self.group_size
        kind = {False: "static", True: "dynamic"}.get(self.dynamic is True or self.dynamic == "local")
        return f"{kind} {self.type}{self.num_bits} by {self.strategy}{'' if size is None else f' {size}'}"


@dataclass(frozen=True)
class QuantGroup:
    """One of the ``config_groups``.  ``inputs`` None: activations stay 16-bit; ``format`` names the tensors' layout."""

    name: str
    weights: QuantArgs
    inputs: QuantArgs | None
    format: str | None

    @property
    def where(self) -> str:
        return f"config_groups.{self.name}"


def quant_group(quantization: Mapping[str, Any], layer: LayerExperts) -> QuantGroup:
    """The group whose targets name the layer's expert modules.

    Exact names win over patterns, patterns over classes.  One group alone needs no matching target: some tools write
    module paths of another naming of the same model.  Raises CheckpointError where there is no group, a malformed one,
    or projections of different groups.
    """
    file = str(layer.checkpoint.path / "config.json")
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{file}: config_groups is {short(groups)}, expected an object with groups")
    entries = {name: group for name, group in groups.items() if isinstance(group, dict) and group.get("weights")}
    if not entries:
        raise CheckpointError(f"{file}: no group of config_groups says how weights are quantised")
    top = quantization.get("format")
    chosen: dict[str, str] = {}
    for projection in sorted(layer.projections):
        module = module_name(layer, projection)
        name = next(iter(entries)) if len(entries) == 1 else _matching(module, entries, file)
        chosen.setdefault(name, module)
    parsed = [_group(name, entries[name], file, top) for name in chosen]
    first = parsed[0]
    for other in parsed[1:]:
        if (str(other.weights), str(other.inputs)) != (str(first.weights), str(first.inputs)):
            raise CheckpointError(
                f"{file}: {chosen[first.name]} has {first.weights} weights ({first.where}), {chosen[other.name]} has "
                f"{other.weights} ({other.where}): all matrices of a layer's experts must be quantised alike"
            )
    return first


def _group(name: str, group: Mapping[str, Any], file: str, top: object) -> QuantGroup:
    entries = QuantEntries(group, f"{file}: config_groups.{name}")
    weights, inputs = entries.part("weights"), entries.part("input_activations")
    if weights is None:
        raise entries.error("weights", "an object")
    named = entries.text("format") or (top if isinstance(top, str) else None)
    return QuantGroup(name, _args(weights), None if inputs is None else _args(inputs), named)


def _args(entries: QuantEntries) -> QuantArgs:
    group_size = entries.integer("group_size", least=-1)
    dynamic = entries.entries.get("dynamic")
    if not isinstance(dynamic, (bool, str, type(None))):
        raise entries.error("dynamic", "true, false or a name")
    return QuantArgs(
        type=entries.text("type", "int") or "int",
        num_bits=entries.integer("num_bits", 8) or 8,
        strategy=entries.text("strategy") or _implied_strategy(group_size),
        group_size=group_size,
        block=entries.block("block_structure"),
        symmetric=entries.boolean("symmetric", True),
        dynamic=False if dynamic is None else dynamic,
        actorder=None if isinstance(entries.entries.get("actorder"), bool) else entries.text("actorder"),
        scale_dtype=entries.text("scale_dtype"),
        where=entries.where,
    )


def _implied_strategy(group_size: int | None) -> str:
    """The strategy of arguments that name none."""
    if group_size is None:
        return "tensor"
    return "channel" if group_size == -1 else "group"


def _matching(module: str, groups: Mapping[str, Mapping[str, Any]], file: str) -> str:
    """Name of the group whose target fits ``module`` best."""
    best: tuple[int, str] | None = None
    for name, group in groups.items():
        targets = group.get("targets")
        for target in targets if isinstance(targets, list) else []:
            rank = _rank(module, target, f"{file}: config_groups.{name}")
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, name)
    if best is None:
        raise CheckpointError(f"{file}: no target of config_groups names {module}")
    return best[1]


def _rank(module: str, target: object, where: str) -> int | None:
    """0 for the module's name, 1 for a pattern, 2 for its class; None where ``target`` is another module."""
    if not isinstance(target, str):
        return None
    if target == module:
        return 0
    if target.startswith("re:"):
        pattern = target.removeprefix("re:")
        try:
            if len(pattern) > _LONGEST_PATTERN:
                raise re.error("it is too long")
            return 1 if re.match(pattern, module) else None
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: the target {short(target)} is no pattern: {error}") from None
    # experts are linear modules, or one module that holds them all
    return 2 if target == "Linear" or target.endswith(("Experts", "MoE")) else None
