"""Apply settings for individual modules of GPTQModel and AutoRound.

GPTQModel's ``dynamic`` and AutoRound's ``extra_config`` are objects whose keys select modules and whose values
override entries of the config (``bits``, ``group_size``, ``sym`` …). All experts of a layer must end up with the same
settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moe_core.checkpoint.config.patterns import NamePatterns
from moe_core.checkpoint.config.quant_args import QuantEntries, short
from moe_core.checkpoint.config.statements import SETTINGS
from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.experts.matrices import expert_modules
from moe_core.checkpoint.tools.namings import under_any_name
from moe_core.errors import CheckpointError

#: Entries that determine how tensors are read.
_DECISIVE = frozenset(name for setting in SETTINGS for name in setting.names)
_META = re.compile(r"[\^$|()\[\]?+*\\{}]")

#: Function that maps a module's name to the key that selects it, or None.
Chooser = Callable[[str], str | None]


def with_overrides(entries: QuantEntries, part: str, layer: LayerExperts) -> QuantEntries:
    """Apply one object of overrides to a layer's experts.

    Args:
        entries: Settings of the tool.
        part: Name of the object with overrides, "dynamic" or "extra_config".
        layer: The layer's expert tensors.

    Returns:
        The settings as they apply to the experts.

    Raises:
        CheckpointError: A key is not a valid pattern, or experts or projections have different settings.
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
                    f"{module}; all matrices of a layer's experts must be quantized alike"
                )
    return entries if first is None else QuantEntries({**entries.entries, **first[1]}, entries.where)


def _dynamic(overrides: QuantEntries) -> Chooser:
    """Select the first pattern that matches at the start of the name.

    Keys may start with "+:" for quantized or "-:" for unquantized modules. Keys with "-:" are skipped, since the
    tensors determine whether experts are quantized.
    """
    kept = NamePatterns()
    patterns = [
        (key, kept.regular(key.removeprefix("+:"), f"{overrides.where}: the key"))
        for key in overrides.entries
        if not key.startswith("-:")
    ]
    return lambda module: next((key for key, pattern in patterns if pattern.match(module)), None)


def _extra_config(overrides: QuantEntries) -> Chooser:
    """Select the exact name, else the last key that is a part of it, else the last pattern."""
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
    """Yield every run of components of a dotted name.

    Looking up each run is fast even if the config has an entry for each module of the model.
    """
    parts = name.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])
