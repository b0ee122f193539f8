"""Discovery and loading of entry points, and which distribution provides them."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
from collections.abc import Callable, Iterable
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
        path: "module:name", or "module:name.attribute".

    Returns:
        The object. Errors of the import propagate.
    """
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


def load_named(
    kind: str, points: Iterable[EntryPoint], check: Callable[[object], T], package: str | None = None
) -> list[tuple[EntryPoint, T | PluginFault]]:
    """Load the plug-in that several entry points of one name stand for.

    Args:
        kind: Kind of plug-in, for the faults.
        points: Entry points of one name.
        check: As in :func:`load`.
        package: First-party distribution that owns the name. It wins a clash.

    Returns:
        The entry point that is used with its result, first; then a fault for each other entry point with the name. If
        the name is ambiguous, faults for all of them.
    """
    different = list(points)
    if len(different) > 1:  # With one, its distribution's metadata need not be read.
        different = list({(point.value, owner(point)): point for point in different}.values())
    mine = [point for point in different if _is_of(point, package)]
    chosen = different[0] if len(different) == 1 else next(iter(mine), None)
    found: list[tuple[EntryPoint, T | PluginFault]] = [] if chosen is None else [(chosen, load(chosen, kind, check))]
    for point in different:
        if point is not chosen:
            other = chosen or next(one for one in different if one is not point)
            reason = f"{other.value} of {owner(other)} has the same name; uninstall one of them"
            found.append((point, PluginFault(kind, point.name, owner(point), reason)))
    return found


def _is_of(point: EntryPoint, package: str | None) -> bool:
    return package is not None and owner(point).partition(" ")[0].lower().replace("_", "-") == package
