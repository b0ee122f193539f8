"""Position of third-party backends in a scheme's order of preference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moe_core.errors import ConfigError

T = TypeVar("T")

#: Placeholder for every backend that the scheme itself provides.
EVERY = "*"


@dataclass(frozen=True)
class Placement:
    """Position of a backend in the order of preference, relative to other backends.

    ``"*"`` stands for all of the scheme's own backends. By default a backend follows the scheme's kernels and
    precedes the last resort, the torch backend, which supports every request. Of the backends whose claims cover the
    request, the first is selected.

    Attributes:
        before: Names of backends that this one precedes.
        after: Names of backends that this one follows.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sides: tuple[object, ...] = (self.before, self.after)
        for side in sides:
            if not isinstance(side, tuple) or not all(isinstance(name, str) for name in side):
                raise ConfigError(
                    f"before and after must be tuples of backend names, e.g. before=('triton',), got {side!r}"
                )

    @property
    def names(self) -> set[str]:
        """Names of all backends that the placement refers to."""
        return {*self.before, *self.after} - {EVERY}

    def __str__(self) -> str:
        sides = (("before", self.before), ("after", self.after))
        return ", ".join(f"{side} {' and '.join(names)}" for side, names in sides if names) or "none"


def arrange(
    own: Sequence[T],
    added: Sequence[T],
    *,
    name_of: Callable[[T], str],
    placement_of: Callable[[T], Placement],
    last_resort: str,
) -> tuple[tuple[T, ...], dict[str, str]]:
    """Insert third-party backends into a scheme's order of preference.

    ``own`` keeps its order. A third-party backend that another one names is inserted first. A name that is not in the
    order is ignored: it may belong to a package that is not installed. A backend that would have to precede one backend
    and follow a later one takes the default position.

    Args:
        own: The scheme's own backends in order.
        added: Third-party backends.
        name_of: Returns the name of a backend.
        placement_of: Returns the placement of a backend.
        last_resort: Name of the backend that third-party backends precede by default.

    Returns:
        All backends in order; and, by name of the added backend, a note if its placement could not be honored
        completely.
    """
    rows, notes = list(own), {}
    mine = [name_of(row) for row in own]
    # Backends with the default placement come first, in an order that does not depend on how packages are found.
    waiting = {
        name_of(row): row for row in sorted(added, key=lambda row: (placement_of(row) != Placement(), name_of(row)))
    }

    def insert(name: str) -> None:
        row = waiting.pop(name)
        placement = placement_of(row)
        for other in sorted(placement.names):
            if other in waiting:
                insert(other)
        here = [name_of(other) for other in rows]
        before = [here.index(n) for n in _expand(placement.before, mine) if n in here]
        after = [here.index(n) + 1 for n in _expand(placement.after, mine) if n in here]
        absent = sorted(placement.names - set(here))
        if before and after and max(after) > min(before):
            notes[name] = f"placement ({placement}) is ignored: no position satisfies both"
            before = after = []
        elif absent:
            notes[name] = f"placement ({placement}) names {', '.join(map(repr, absent))}, not in the order before it"
        default = here.index(last_resort) if last_resort in here else len(here)
        rows.insert(min(before) if before else max(after, default=default), row)

    while waiting:
        insert(next(iter(waiting)))
    return tuple(rows), notes


def _expand(names: tuple[str, ...], own: Sequence[str]) -> list[str]:
    return [other for name in names for other in (own if name == EVERY else (name,))]
