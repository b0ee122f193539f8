"""Settings that hold for some modules only: GPTQModel's ``dynamic``, AutoRound's ``extra_config``.

Both are objects whose keys choose modules and whose values replace entries of the config (``bits``, ``group_size``,
``sym`` …).  A layer's experts must come out alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from moe_core.checkpoint.experts import LayerExperts
from moe_core.checkpoint.matrices import module_name
from moe_core.checkpoint.quant_args import QuantEntries, short
from moe_core.errors import CheckpointError

#: the entries that decide how tensors are read
_DECISIVE = ("bits", "group_size", "sym", "data_type", "act_bits", "act_data_type", "desc_act")
_META = re.compile(r"[\^$|()\[\]?+*\\{}]")
#: longer patterns are refused before they are compiled
_LONGEST_PATTERN = 1000

#: a module's name -> the key that chooses it, None where none does
Chooser = Callable[[str], str | None]


def with_overrides(entries: QuantEntries, part: str, layer: LayerExperts) -> QuantEntries:
    """``entries`` as they hold for the layer's experts, with what the object ``part`` says of them.

    Raises CheckpointError for keys that are no patterns, and where experts or projections would differ.
    """
    overrides = entries.part(part)
    if overrides is None or not overrides.entries:
        return entries
    choose = (_dynamic if part == "dynamic" else _extra_config)(overrides)
    first: tuple[str, Mapping[str, Any]] | None = None
    for projection in sorted(layer.projections):
        for expert in range(1 if layer.stacked_names else layer.num_experts):
            module = module_name(layer, projection, expert)
            key = choose(module)
            chosen = None if key is None else overrides.part(key)
            merged = {**entries.entries, **(chosen.entries if chosen is not None else {})}
            if first is None:
                first = module, merged
            for name in _DECISIVE:
                if merged.get(name) != first[1].get(name):
                    raise CheckpointError(
                        f"{overrides.where}: {name} is {short(first[1].get(name))} for {first[0]} and "
                        f"{short(merged.get(name))} for {module}; all matrices of a layer's experts must be quantised "
                        "alike"
                    )
    return entries if first is None else QuantEntries(first[1], entries.where)


def _dynamic(overrides: QuantEntries) -> Chooser:
    """The first pattern that fits from the start; "-:" before it: modules that are not quantised, "+:": those that are.

    Experts whose tensors are quantised are so whatever "-:" says, as lists of ignored modules are not looked at.
    """
    patterns = [
        (key, _compiled(re.sub(r"^[+-]:", "", key), overrides.where))
        for key in overrides.entries
        if not key.startswith("-:")
    ]
    return lambda module: next((key for key, pattern in patterns if pattern.match(module)), None)


def _extra_config(overrides: QuantEntries) -> Chooser:
    """A module's own name, else the last part of a name or pattern that is found in it."""
    patterns = [(key, _compiled(key, overrides.where)) for key in overrides.entries if _META.search(key)]
    parts = [key for key in overrides.entries if not _META.search(key)]

    def choose(module: str) -> str | None:
        if module in overrides.entries:
            return module
        found = [key for key, pattern in patterns if pattern.search(module)]
        found += [key for key in parts if f".{key}." in f".{module}."]
        return found[-1] if found else None

    return choose


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        if len(pattern) > _LONGEST_PATTERN:
            raise re.error("it is too long")
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: the key {short(pattern)} is no pattern: {error}") from None
