"""Entry points: which are installed, whose they are, and what they give."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import TypeVar

from moe_core.errors import RegistryError
from moe_core.plugins.faults import PluginFault, Raised, attempt

T = TypeVar("T")


def installed(group: str) -> list[EntryPoint | PluginFault]:
    """The entry points of ``group`` in this environment; a PluginFault for a distribution whose list is unreadable."""
    try:
        return list(importlib.metadata.entry_points(group=group))
    except Exception:
        # one unreadable list makes all of them unreadable at once
        return _one_by_one(group)


def _one_by_one(group: str) -> list[EntryPoint | PluginFault]:
    found: list[EntryPoint | PluginFault] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        origin = _named(distribution)
        name = origin.partition(" ")[0]
        if name in seen:  # further down the path, so that the one before hides it
            continue
        seen.add(name)
        points = attempt(lambda distribution=distribution: distribution.entry_points.select(group=group))  # type: ignore[misc]
        if isinstance(points, Raised):
            reason = f"its entry points cannot be read: {points}"
            found.append(PluginFault("distribution", name, origin, reason, points.error))
        else:
            found += points
    return found


def owner(point: EntryPoint) -> str:
    """Name and version of the distribution that brings an entry point."""
    return "an unknown distribution" if point.dist is None else _named(point.dist)


def _named(distribution: importlib.metadata.Distribution) -> str:
    named = attempt(lambda: f"{distribution.name} {distribution.version}")
    return "a distribution without metadata" if isinstance(named, Raised) else named


def load(point: EntryPoint, kind: str, check: Callable[[object], T]) -> T | PluginFault:
    """What ``point`` gives, if ``check`` returns it; its RegistryError says why not."""

    def fault(reason: str, cause: BaseException | None, raises: type[RegistryError] = RegistryError) -> PluginFault:
        return PluginFault(kind, point.name, owner(point), f"{point.value} {reason}", cause, raises)

    found = attempt(point.load)
    if isinstance(found, Raised):
        return fault(f"cannot be loaded: {found}", found.error)
    checked = attempt(lambda: check(found))
    if not isinstance(checked, Raised):
        return checked
    if isinstance(checked.error, RegistryError):
        return fault(checked.error.message, None, type(checked.error))
    return fault(f"cannot be examined: {checked}", checked.error)


def imported(path: str) -> object:
    """What "module:name" names, imported now; raises what the import raises."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def one_of(kind: str, points: Sequence[EntryPoint], package: str | None = None) -> EntryPoint | list[PluginFault]:
    """The entry point among several of one name; a fault for each where it is not clear which one is meant.

    ``package``: whose the name is; then there may be others, which the caller names by :func:`others_of`.
    """
    different = _different(points)
    if len(different) == 1:
        return different[0]
    mine = [point for point in different if _is_of(point, package)]
    if mine:
        return mine[0]
    return [
        PluginFault(kind, point.name, owner(point), f"{_text(other)} has the same name; uninstall one of them")
        for point in different
        for other in different
        if other is not point
    ]


def others_of(kind: str, points: Sequence[EntryPoint], chosen: EntryPoint) -> list[PluginFault]:
    """A fault for each entry point that has the name of ``chosen``."""
    return [
        PluginFault(
            kind, point.name, owner(point), f"{_text(point)}: the name is that of {_text(chosen)}; uninstall one"
        )
        for point in _different(points)
        if point is not chosen and (point.value, owner(point)) != (chosen.value, owner(chosen))
    ]


def _different(points: Sequence[EntryPoint]) -> Sequence[EntryPoint]:
    if len(points) == 1:  # whose it is costs reading that distribution's metadata
        return points
    return tuple({(point.value, owner(point)): point for point in points}.values())


def _text(point: EntryPoint) -> str:
    return f"{point.value} of {owner(point)}"


def _is_of(point: EntryPoint, package: str | None) -> bool:
    return package is not None and owner(point).partition(" ")[0].lower().replace("_", "-") == package
