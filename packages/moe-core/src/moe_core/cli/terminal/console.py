"""Robust output to stdout and stderr that are closed, full, ASCII-only or no longer read."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from moe_core.errors import printable

#: ASCII replacements of characters that this package prints
_PLAIN = {"µ": "u", "×": "x", "…": "...", "–": "-", "−": "-", "—": "-", "±": "+-", "→": "->", "≤": "<=", "≥": ">="}

#: Longer lines are a mistake: a tensor's name, or an argument of a million digits.
LONGEST_LINE = 1000
#: width of a progress bar in characters
BAR = 24


def prepare() -> None:
    """Make stdout and stderr replace characters that they cannot encode."""
    codecs.register_error("moe_plain", _encode_plain)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="moe_plain")


def _encode_plain(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    plain = "".join(_PLAIN.get(letter) or letter.encode("ascii", "backslashreplace").decode() for letter in text)
    return plain, error.end


def _shortened(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]} … ({len(line) - 2 * half} more characters) … {line[-half:]}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to stdout and flush.

    Args:
        text: The text.
        stream: Another stream to print to.

    Raises:
        BrokenPipeError: The reader has closed the stream.
        OSError: The stream cannot be written.
    """
    out = stream or sys.stdout
    if out is None:
        raise OSError(errno.EBADF, "closed", "stdout")
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise OSError(error.errno, error.strerror, "stdout") from None


def complain(text: str) -> None:
    """Print an error to stderr, if there is one; long lines are shortened.

    Args:
        text: The message.
    """
    if sys.stderr is None:
        return
    try:
        print("\n".join(map(_shortened, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        # Nothing can be printed any more.
        _to_nowhere(sys.stderr)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, float | None], None]]:
    """Show a line on stderr during an operation, if stderr is a terminal.

    Args:
        what: Name of the operation.

    Yields:
        A function that replaces the line. It takes the text, and the completed fraction (0 to 1, shown as a bar) or
        None.
    """
    # Processes of torchrun share a terminal; only the first one shows progress.
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda text, part: None
        return

    def tell(text: str, part: float | None) -> None:
        done = round(BAR * min(max(part or 0.0, 0.0), 1.0))
        bar = "" if part is None else f"[{'#' * done}{'.' * (BAR - done)}] "
        # A line that wraps could not be erased.
        line = f"{bar}{printable(text)} …"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    print(f"{what} …", end="", file=sys.stderr, flush=True)
    try:
        yield tell
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """Discard the contents of stdout's buffer, which must not raise when the process ends."""
    _to_nowhere(sys.stdout)


def _to_nowhere(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # The stream is not a file of the system.
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
