"""Commands of other packages.

They are entry points ``NAME = "module:COMMAND"`` in the group ``moe_core.commands``.

The module holds a :class:`~moe_core.cli.command.Command`. It must not import anything slow, least of all torch, because
help and completion load it. A command that does not work is omitted, and everything else works.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint

from moe_core.cli.command import Command
from moe_core.errors import RegistryError
from moe_core.plugins.entry_points import installed, load_named, owner
from moe_core.plugins.faults import PluginFault, split

GROUP = "moe_core.commands"

#: commands of moe-core, whose names are reserved
OWN = ("quickstart", "run", "explain", "backends", "doctor", "bench", "tune")

#: commands of other packages of this project, for users who ask for one that is not installed
KNOWN = {"generate": "moe-transformers", "perplexity": "moe-transformers"}


def names() -> tuple[str, ...]:
    """Return the names of the commands of other packages without loading them."""
    return tuple(sorted({point.name for point in _points()} - set(OWN)))


def load(name: str) -> Command | PluginFault:
    """Load a command.

    Args:
        name: One of :func:`names`.

    Returns:
        The command, or the reason why it does not work.
    """
    return load_named("command", [point for point in _points() if point.name == name], _checked)[0][1]


def faults() -> tuple[PluginFault, ...]:
    """Load all commands and return those that are omitted."""
    reserved = [point for point in _points() if point.name in OWN]
    taken = [PluginFault("command", point.name, owner(point), "the name is moe-core's") for point in reserved]
    return (*taken, *split(map(load, names()))[1])


def _points() -> tuple[EntryPoint, ...]:
    # `moe doctor` names distributions whose entry points cannot be read.
    return split(installed(GROUP))[0]


def _checked(found: object) -> Command:
    if not isinstance(found, Command):
        raise RegistryError(f"is of type {type(found).__name__}, expected a Command")
    return found
