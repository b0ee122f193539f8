"""Settings that hold for some modules only: GPTQModel's ``dynamic``, AutoRound's ``extra_config``.

Both are objects whose keys choose modules and whose values replace entries of the config (``bits``, ``group_size``,
``sym`` …).  A layer's experts must come out alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_core.checkpoint.config.patterns import NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries, short
from moe_core.checkpoint.config.statements import FACTS
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import expert_modules
from moe_core.checkpoint.tools.namings import under_any_name
from moe_core.errors import CheckpointError

#: the entries that decide how tensors are read
_DECISIVE = frozenset(name for fact in FACTS for name in fact.names)
_META = re.compile(r"[\^$|()\[\]?+*\\{}]")

#: a module's name -> the key that chooses it, None where none does
Chooser = Callable[[str], str | None]


def with_overrides(entries: QuantEntries, part: str, layer: LayerExperts) -> QuantEntries:
    """``entries`` as they hold for the layer's experts, with what the object ``part`` says of them.

    Raises CheckpointError for keys that are no patterns, and where experts or projections would differ.
    """
    overrides = entries.part(part)
    if overrides is None or not overrides.entries:
        return entries
    choose = under_any_name((_dynamic if part == "dynamic" else _extra_config)(overrides), layer)
    first: tuple[str, Mapping[str, Any]] | None = None
    for _, _, module in expert_modules(layer):
        key = choose(module)
        part_of_module = None if key is None else overrides.part(key)
        chosen = {} if part_of_module is None else part_of_module.entries
        if first is None:
            first = module, chosen
        for name in sorted(_DECISIVE & (chosen.keys() | first[1].keys())):
            values = [own.get(name, entries.entries.get(name)) for own in (first[1], chosen)]
            if values[0] != values[1]:
                raise CheckpointError(
                    f"{overrides.where}: {name} is {short(values[0])} for {first[0]} and {short(values[1])} for "
                    f"{module}; all matrices of a layer's experts must be quantised alike"
                )
    return entries if first is None else QuantEntries({**entries.entries, **first[1]}, entries.where)


def _dynamic(overrides: QuantEntries) -> Chooser:
    """The first pattern that fits from the start; "-:" before it: modules that are not quantised, "+:": those that are.

    Experts whose tensors are quantised are so whatever "-:" says, as lists of ignored modules are not looked at.
    """
    kept = NamePatterns()
    patterns = [
        (key, kept.regular(key.removeprefix("+:"), f"{overrides.where}: the key"))
        for key in overrides.entries
        if not key.startswith("-:")
    ]
    return lambda module: next((key for key, pattern in patterns if pattern.match(module)), None)


def _extra_config(overrides: QuantEntries) -> Chooser:
    """A module's own name, else the last part of a name, or pattern, that is found in it."""
    kept = NamePatterns()
    patterns = [
        (key, kept.regular(key, f"{overrides.where}: the key")) for key in overrides.entries if _META.search(key)
    ]
    places = {key: place for place, key in enumerate(overrides.entries)}

    def choose(module: str) -> str | None:
        if module in places:
            return module
        parts = [part for part in _runs(module) if part in places]
        if parts:
            return max(parts, key=places.__getitem__)
        found = [key for key, pattern in patterns if pattern.search(module)]
        return found[-1] if found else None

    return choose


def _runs(name: str) -> Iterator[str]:
    """Every run of whole parts of a dotted name: configs may hold an entry for each module of the model."""
    parts = name.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])
