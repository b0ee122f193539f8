"""Discovery and loading of entry points, and which distribution provides them."""

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
    """List the entry points of a group in this environment.

    Args:
        group: Name of the entry-point group.

    Returns:
        The entry points, and a PluginFault for each distribution whose list cannot be read.
    """
    try:
        return list(importlib.metadata.entry_points(group=group))
    except Exception:
        # One unreadable list makes this call fail for all distributions.
        return _one_by_one(group)


def _one_by_one(group: str) -> list[EntryPoint | PluginFault]:
    found: list[EntryPoint | PluginFault] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        origin = _named(distribution)
        name = origin.partition(" ")[0]
        if name in seen:  # A later distribution on the path, hidden by the earlier one.
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
    """Name and version of the distribution that provides an entry point.

    Args:
        point: The entry point.

    Returns:
        "name version".
    """
    return "an unknown distribution" if point.dist is None else _named(point.dist)


def _named(distribution: importlib.metadata.Distribution) -> str:
    named = attempt(lambda: f"{distribution.name} {distribution.version}")
    return "a distribution without metadata" if isinstance(named, Raised) else named


def load(point: EntryPoint, kind: str, check: Callable[[object], T]) -> T | PluginFault:
    """Load an entry point and check the loaded object.

    Args:
        point: The entry point.
        kind: Kind of plug-in, for the fault.
        check: Validates and returns the object; raises RegistryError with the reason if it is invalid.

    Returns:
        The result of ``check``, or the fault.
    """

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
    """Import the object that "module:name" refers to.

    Args:
        path: "module:name".

    Returns:
        The object. Errors of the import propagate.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def one_of(kind: str, points: Sequence[EntryPoint], package: str | None = None) -> EntryPoint | list[PluginFault]:
    """Select the entry point to use among several of the same name.

    Args:
        kind: Kind of plug-in, for the faults.
        points: Entry points of one name.
        package: First-party distribution that owns the name. It wins a clash; the caller reports the others with
            :func:`others_of`.

    Returns:
        The entry point, or faults for all of them if the name is ambiguous.
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
    """Make a fault for each other entry point with the name of ``chosen``.

    Args:
        kind: Kind of plug-in, for the faults.
        points: Entry points of one name.
        chosen: The entry point that is used.

    Returns:
        The faults.
    """
    return [
        PluginFault(
            kind, point.name, owner(point), f"{_text(point)}: the name is that of {_text(chosen)}; uninstall one"
        )
        for point in _different(points)
        if point is not chosen and (point.value, owner(point)) != (chosen.value, owner(chosen))
    ]


def _different(points: Sequence[EntryPoint]) -> Sequence[EntryPoint]:
    if len(points) == 1:  # Finding the owner would read the distribution's metadata.
        return points
    return tuple({(point.value, owner(point)): point for point in points}.values())


def _text(point: EntryPoint) -> str:
    return f"{point.value} of {owner(point)}"


def _is_of(point: EntryPoint, package: str | None) -> bool:
    return package is not None and owner(point).partition(" ")[0].lower().replace("_", "-") == package
