"""Where backends of other packages stand among a scheme's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from moe_core.errors import ConfigError

T = TypeVar("T")

#: in place of names: every backend that the scheme itself brings
EVERY = "*"


@dataclass(frozen=True)
class Placement:
    """The place of a backend in the order of preference: ``before`` and ``after`` backends of these names.

    ``"*"`` stands for all of the scheme's own.  A backend that says nothing stands after the scheme's kernels and
    before its last resort, the torch backend, which always fits.  Claims decide the rest: the first that fits is taken.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sides: tuple[object, ...] = (self.before, self.after)
        for side in sides:
            if not isinstance(side, tuple) or not all(isinstance(name, str) for name in side):
                raise ConfigError(f"a placement names backends in tuples, e.g. before=('triton',), got {side!r}")

    @property
    def names(self) -> set[str]:
        """Every backend that is named."""
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
    """(``own`` with ``added`` in their places, what could not be honoured by the name of the added one).

    ``own`` keeps its order.  A name that nobody has is passed over, since it may be that of a package which is not
    installed; a place that cannot be (before one backend and after a later one, or in a circle of added ones) is given
    up for the place of those that say nothing.
    """
    rows, notes = list(own), {}
    mine = [name_of(row) for row in own]
    known = {*mine, *map(name_of, added)}
    # those that say nothing first: others may name them
    waiting = sorted(added, key=lambda row: (placement_of(row) != Placement(), name_of(row)))
    while waiting:
        left = {name_of(row) for row in waiting}
        ready = [row for row in waiting if not left & placement_of(row).names - {name_of(row)}]
        # in a circle each waits for another: the first breaks it
        row = (ready or waiting)[0]
        waiting.remove(row)
        name, placement = name_of(row), placement_of(row)
        here = [name_of(other) for other in rows]
        before = [here.index(n) for n in _expand(placement.before, mine) if n in here]
        after = [here.index(n) + 1 for n in _expand(placement.after, mine) if n in here]
        unknown = sorted(placement.names - known)
        if not ready or name in placement.names:
            notes[name] = f"its place ({placement}) is given up: it is in a circle"
        elif before and after and max(after) > min(before):
            notes[name] = f"its place ({placement}) is given up: here no place is both"
        else:
            if unknown:
                notes[name] = f"no backend is called {', '.join(map(repr, unknown))}, beside which it is to stand"
            if before or after:
                rows.insert(min(before) if before else max(after), row)
                continue
        rows.insert(here.index(last_resort) if last_resort in here else len(here), row)
    return tuple(rows), notes


def _expand(names: tuple[str, ...], own: Sequence[str]) -> list[str]:
    return [other for name in names for other in (own if name == EVERY else (name,))]
