"""Execution of a command, and its errors as one paragraph.

Each command is a module whose ``run(arguments)`` returns the exit code. :mod:`moe_core.cli.main` reads the arguments
and calls :func:`execute`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from moe_core.cli.terminal.console import complain, progress
from moe_core.errors import CheckpointWarning, FallbackWarning, MoEError, PluginWarning, RegistryError, printable
from moe_core.plugins.entry_points import imported
from moe_core.plugins.faults import Raised, attempt, printing_aside

__all__ = ["execute", "paragraph"]

#: warnings for users; ``doctor`` lists their content itself
_TOLD = (PluginWarning, FallbackWarning)

#: texts of a plain RuntimeError that torch raises if host memory is too small
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


def execute(arguments: argparse.Namespace) -> int:
    """Run one command.

    Args:
        arguments: Parsed arguments.

    Returns:
        The exit code.

    Raises:
        RegistryError: The package of the command does not work.
    """
    command = arguments.command

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        who = f"moe {command}" if issubclass(category, _TOLD) else "moe"
        complain(printable(f"{who}: warning: {message}"))

    with printing_aside(), warnings.catch_warnings():
        # Commands report these conditions themselves where they matter.
        warnings.simplefilter("ignore", CheckpointWarning)
        for category in _TOLD:
            warnings.simplefilter("ignore" if command == "doctor" else "default", category)
        warnings.showwarning = show
        return _loaded(arguments.run)(arguments)


def _loaded(path: str) -> Callable[[argparse.Namespace], int]:
    """Return the function that runs a command; RegistryError if its package does not work."""
    package = path.partition(".")[0]
    with progress(f"loading {package}") if package not in sys.modules else contextlib.nullcontext():
        found: Any = attempt(lambda: imported(path))
    if isinstance(found, Raised):
        raise RegistryError(f"{path} cannot be loaded: {found}; what else is missing: moe doctor") from found.error
    return found  # type: ignore[no-any-return]


def paragraph(error: Exception, *, verbose: bool = False) -> str:
    """Format an error for people.

    Args:
        error: The error.
        verbose: Whether to include everything that was tried.

    Returns:
        The text, with unprintable characters escaped.
    """
    return printable(_paragraph(error, verbose), keep="\n")


def _paragraph(error: Exception, verbose: bool) -> str:
    from safetensors import SafetensorError
    from torch import OutOfMemoryError

    if isinstance(error, MoEError):
        if verbose or not error.details:
            return str(error)
        return f"{error.message} (-v: details)"
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        detail = str(error).partition(".")[0] or "the host has none left"
        return f"out of memory: {detail}; try fewer tokens or another device"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
        wanted = re.search(r"tried to allocate (\d+ bytes)", str(error))
        detail = f"torch was refused {wanted[1]}" if wanted else "the tensors are larger than any memory"
        return f"out of memory: {detail}; try fewer tokens or another device"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    if isinstance(error, SafetensorError):
        return f"safetensors: {error}"
    package = _raised_by(error)
    known = f"It comes from {package}" if package else "This is a fault of moe, not of the input"
    return f"unexpected {type(error).__name__}: {error}\n{known}; MOE_TRACEBACK=1 shows where it happened."


def _raised_by(error: Exception) -> str | None:
    """Return the package whose code raised ``error``; None for packages of this project."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    package = modules[-1].partition(".")[0] if modules else ""
    return None if not package or package.startswith("moe_") else package
