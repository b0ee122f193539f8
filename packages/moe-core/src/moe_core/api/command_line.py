"""What packages use to bring a command to ``moe``, where it says which arguments it takes.

An entry point ``NAME = "my_package_cli:COMMAND"`` in the group ``moe_core.commands`` names a :class:`Command`.  Its
module is loaded for help and completion, so it imports nothing of ``moe_core``, nor torch: a package beside the one
that does the work, as ``moe_core.cli`` is.  ``Command.check`` refuses arguments before
torch is imported.  What the command does stands in ``Command.run`` ("my_package.report:run"),
a function that takes the arguments and returns the exit code; :mod:`moe_core.api.commands` is what it uses.

Names change their meaning, or go, with a new major :data:`moe_core.INTERFACE_API` only.
"""

from __future__ import annotations

from moe_core.cli.arguments import (
    add_activation_key,
    add_backend,
    add_checkpoint,
    add_device,
    add_dtype,
    add_quantize,
    add_seed,
)
from moe_core.cli.checks import RefusedError, check_file, check_folder, check_least
from moe_core.cli.command import Command
from moe_core.cli.parser import path, whole

__all__ = [
    "Command",
    "RefusedError",
    "add_activation_key",
    "add_backend",
    "add_checkpoint",
    "add_device",
    "add_dtype",
    "add_quantize",
    "add_seed",
    "check_file",
    "check_folder",
    "check_least",
    "path",
    "whole",
]
