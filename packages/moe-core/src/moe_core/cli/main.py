"""Entry point of `moe`: from arguments to the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from moe_core.cli.checks import RefusedError
from moe_core.cli.grammar import build, parse
from moe_core.cli.terminal import console, signals


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
            if arguments.precheck is not None:
                arguments.precheck(arguments)
            code = _execute(arguments.command, arguments, ending)
        except RefusedError as refused:
            console.complain(f"moe {arguments.command}: {console.printable(str(refused))}")
            return 2
        except KeyboardInterrupt as interrupt:
            number = signals.number_of(interrupt)
            console.complain(f"moe: {signals.NAMES[number]}")
            return 128 + number
        except BrokenPipeError:
            console.abandon_stdout()
            return 141
        return ending.exit_code(code)


def _execute(command: str, arguments: object, ending: signals.Ending) -> int:
    with console.progress("loading torch") if "torch" not in sys.modules else contextlib.nullcontext():
        from moe_core.cli.execute import execute, paragraph

    ending.imported()
    try:
        return execute(arguments)  # type: ignore[arg-type]
    except (BrokenPipeError, RefusedError):
        raise
    except Exception as error:
        if os.environ.get("MOE_TRACEBACK"):
            raise
        console.complain(f"moe {command}: {paragraph(error, verbose=getattr(arguments, 'verbose', False))}")
        return 2


def _complete() -> None:
    """Answer a shell's completion request and exit."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(build())
