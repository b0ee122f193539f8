"""stdout and stderr as they are: closed, full, in ASCII, read by somebody who has left."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

#: characters of our own, where a terminal has no such letters
_PLAIN = {"µ": "u", "×": "x", "…": "...", "–": "-", "−": "-", "—": "-", "±": "+-", "→": "->", "≤": "<=", "≥": ">="}

#: longer lines are somebody's mistake: a tensor's name, an argument of a million digits
LONGEST_LINE = 1000
#: characters of a progress bar
BAR = 24


def prepare() -> None:
    """Make stdout and stderr print what they can't encode as something that they can."""
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


def printable(text: str) -> str:
    """``text`` with escapes in place of characters that a terminal might take as a command."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


def _shortened(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2
    return f"{line[:half]} … ({len(line) - 2 * half} more characters) … {line[-half:]}"


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to stdout, all of it at once.  BrokenPipeError: the reader has left; OSError: it can't be written."""
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
    """Print an error to stderr, if there is one; long lines are cut."""
    if sys.stderr is None:
        return
    try:
        print("\n".join(map(_shortened, text.split("\n"))), file=sys.stderr, flush=True)
    except OSError:
        # nobody is left to tell
        _to_nowhere(sys.stderr)


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str, float | None], None]]:
    """Show a line on stderr while something lasts, if stderr is a terminal.

    Args:
        what: What goes on.

    Yields:
        A function that replaces the line: its text, and the part that is done (0 to 1, shown as a bar) or None.
    """
    # torchrun's processes share a terminal: the first one says what goes on
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda text, part: None
        return

    def tell(text: str, part: float | None) -> None:
        done = round(BAR * min(max(part or 0.0, 0.0), 1.0))
        bar = "" if part is None else f"[{'#' * done}{'.' * (BAR - done)}] "
        # what does not fit in a line could not be wiped away
        line = f"{bar}{printable(text)} …"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    print(f"{what} …", end="", file=sys.stderr, flush=True)
    try:
        yield tell
    finally:
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def abandon_stdout() -> None:
    """Let what is left in stdout's buffer go nowhere: it must not raise when the process ends."""
    _to_nowhere(sys.stdout)


def _to_nowhere(stream: TextIO) -> None:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # no file of the system's
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
