"""Commands of other packages.

They are entry points ``NAME = "module:COMMAND"`` in the group ``moe_core.commands``.

The module holds a :class:`~moe_core.cli.command.Command`. It must not import anything slow, least of all torch, because
help and completion load it. A command that does not work is omitted, and everything else works.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from moe_core.cli.command import Command

GROUP = "moe_core.commands"

#: commands of moe-core, whose names are reserved
OWN = ("quickstart", "run", "explain", "backends", "doctor", "bench", "tune")

#: commands of other packages of this project, for users who ask for one that is not installed
KNOWN = {"generate": "moe-transformers", "perplexity": "moe-transformers"}


@dataclass(frozen=True)
class CommandFault:
    """A command that was omitted.

    Attributes:
        name: Name of the command.
        origin: Distribution that brings it.
        reason: Why it was omitted.
    """

    name: str
    origin: str
    reason: str

    @property
    def summary(self) -> str:
        """Text of the list of commands."""
        return self.reason

    def __str__(self) -> str:
        return f"command {self.name!r} of {self.origin} is left out: {self.reason}"


def names() -> tuple[str, ...]:
    """Return the names of the commands of other packages without loading them."""
    return tuple(sorted({point.name for point in _points()} - set(OWN)))


def load(name: str) -> Command | CommandFault:
    """Load a command.

    Args:
        name: One of :func:`names`.

    Returns:
        The command, or the reason why it does not work.
    """
    points = list({(point.value, _owner(point)): point for point in _points() if point.name == name}.values())
    first = points[0]
    if len(points) > 1:
        return CommandFault(name, _owner(first), f"{_owner(points[1])} has the same name; uninstall one of them")
    try:
        found = first.load()
    except (Exception, SystemExit) as error:
        return CommandFault(name, _owner(first), f"{first.value} cannot be loaded: {type(error).__name__}: {error}")
    if not isinstance(found, Command):
        return CommandFault(name, _owner(first), f"{first.value} is of type {type(found).__name__}, expected a Command")
    return found


def faults() -> tuple[CommandFault, ...]:
    """Load all commands and return those that are omitted."""
    taken = [
        CommandFault(point.name, _owner(point), "the name is moe-core's") for point in _points() if point.name in OWN
    ]
    loaded = map(load, names())
    return (*taken, *(found for found in loaded if isinstance(found, CommandFault)))


def _points() -> tuple[EntryPoint, ...]:
    try:
        return tuple(importlib.metadata.entry_points(group=GROUP))
    except Exception:  # The metadata of one distribution may be unreadable; `moe doctor` names it.
        return ()


def _owner(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"
