"""``moe``: the command line.

Every command takes ``--json``.  Results go to stdout, progress (on a terminal) and errors to stderr.  Exit codes:
0 done, 1 a comparison failed, 2 what was asked for can't be done (one paragraph says why), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence

_ABOUT = "Quantised mixture-of-experts layers: what runs them, why, how exactly and how fast."

#: what torch says, as a plain RuntimeError, where a host's memory is too small
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")

COMMANDS = ("quickstart", "run", "explain", "backends", "doctor", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("moe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of a pipe has gone; what is left in the buffer must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        from moe_core.errors import printable

        if os.environ.get("MOE_TRACEBACK"):
            raise
        print(printable(f"moe {arguments.command}: {_paragraph(error)}", keep="\n"), file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    from moe_core.errors import CheckpointWarning

    with warnings.catch_warnings():
        # commands say it themselves, where it matters
        warnings.simplefilter("ignore", CheckpointWarning)
        result: int = importlib.import_module(f"moe_core.cli.{arguments.command}").run(arguments)
    sys.stdout.flush()
    return result


def _parser() -> argparse.ArgumentParser:
    from moe_core import __version__

    parser = argparse.ArgumentParser(
        prog="moe",
        description="\n".join([_ABOUT, "", "commands:", *(f"  {n:<10}  {_summary(n)}" for n in COMMANDS)]),
        epilog="MOE_TRACEBACK=1 shows the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"moe-core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"moe_core.cli.{name}")
        command = commands.add_parser(
            name,
            description=(module.__doc__ or "").strip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _summary(name: str) -> str:
    """What a command's docstring says after its name."""
    text = importlib.import_module(f"moe_core.cli.{name}").__doc__ or ""
    return text.partition("\n")[0].partition(": ")[2].rstrip(".")


def _paragraph(error: Exception) -> str:
    """What went wrong, for people."""
    from torch import OutOfMemoryError

    from moe_core.errors import MoEError

    if isinstance(error, MoEError):
        return str(error)
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        detail = str(error).partition(".")[0] or "the host has none left"
        return f"out of memory: {detail}; try fewer tokens or another device"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
        wanted = re.search(r"tried to allocate (\d+ bytes)", str(error))
        detail = f"torch was refused {wanted[1]}" if wanted else "the tensors are larger than any memory"
        return f"out of memory: {detail}; try fewer tokens or another device"
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return (
        f"unexpected {type(error).__name__}: {error}\nThis is a fault of moe, not of the input; "
        "MOE_TRACEBACK=1 shows where it happened."
    )
