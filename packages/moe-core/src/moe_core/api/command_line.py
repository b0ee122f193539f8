"""Declare the command-line arguments of a ``moe`` subcommand that another package adds.

An entry point ``NAME = "my_package_cli:COMMAND"`` in the group ``moe_core.commands`` names a :class:`Command`. Its
module is loaded for help and completion, so it must not import torch. ``Command.check`` rejects invalid arguments
before torch is imported, with a :class:`moe_core.ConfigError`. ``Command.run`` ("my_package.report:run") names the
implementation: a function that takes the arguments and returns the exit code. :mod:`moe_core.api.commands` has helpers
for it.

Names change meaning or are removed only with a new major version of :data:`moe_core.INTERFACE_API`.
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
from moe_core.cli.checks import check_file, check_folder, check_least
from moe_core.cli.command import Command
from moe_core.cli.parser import path, whole

__all__ = [
    "Command",
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
