"""Entry point of `moe`: from arguments to the exit code, and errors as one paragraph."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

from moe_core.cli.grammar import build, parse
from moe_core.cli.terminal import console, signals
from moe_core.errors import CheckpointWarning, FallbackWarning, MoEError, PluginWarning, RegistryError, printable
from moe_core.plugins.entry_points import imported
from moe_core.plugins.faults import Raised, attempt, printing_aside

#: warnings for users; ``doctor`` lists their content itself
_TOLD = (PluginWarning, FallbackWarning)

#: texts of a plain RuntimeError that torch raises if host memory is too small
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        The exit code.

    Raises:
        SystemExit: Help was requested, or the arguments were refused.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    with signals.ending_quietly() as ending:
        console.prepare()
        arguments = parse(argv)
        try:
            return ending.exit_code(_run(arguments, ending))
        except KeyboardInterrupt as interrupt:
            number = signals.number_of(interrupt)
            console.complain(f"moe: {signals.NAMES[number]}")
            return 128 + number
        except BrokenPipeError:
            console.abandon_stdout()
            return 141
        except Exception as error:
            if os.environ.get("MOE_TRACEBACK"):
                raise
            console.complain(f"moe {arguments.command}: {paragraph(error, verbose=arguments.verbose)}")
            return ending.exit_code(2)


def _run(arguments: argparse.Namespace, ending: signals.Ending) -> int:
    """Check the arguments, import torch and run the command."""
    command, path = arguments.command, arguments.run
    if arguments.precheck is not None:
        arguments.precheck(arguments)
    with _loading("torch"):
        import torch  # noqa: F401
    ending.imported()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        who = f"moe {command}" if issubclass(category, _TOLD) else "moe"
        console.complain(printable(f"{who}: warning: {message}"))

    with printing_aside(), warnings.catch_warnings():
        # Commands report these conditions themselves where they matter.
        warnings.simplefilter("ignore", CheckpointWarning)
        for category in _TOLD:
            warnings.simplefilter("ignore" if command == "doctor" else "default", category)
        warnings.showwarning = show
        with _loading(path.partition(".")[0]):
            found: Any = attempt(lambda: imported(path))
        if isinstance(found, Raised):
            raise RegistryError(f"{path} cannot be loaded: {found}; what else is missing: moe doctor") from found.error
        code: int = found(arguments)
        return code


def _loading(package: str) -> contextlib.AbstractContextManager[object]:
    return console.progress(f"loading {package}") if package not in sys.modules else contextlib.nullcontext()


def _complete() -> None:
    """Answer a shell's completion request and exit."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(build())


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
    if isinstance(error, MoEError):
        if verbose or not error.details:
            return str(error)
        return f"{error.message} (-v: details)"
    from safetensors import SafetensorError
    from torch import OutOfMemoryError

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
