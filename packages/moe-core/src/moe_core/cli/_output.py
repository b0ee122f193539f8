"""Output of commands: text or JSON on stdout, progress on stderr, and files and folders."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from moe_core._support.atomic_write import check_writable, writing
from moe_core.cli.terminal.console import progress as progress
from moe_core.cli.terminal.console import say
from moe_core.errors import ConfigError, printable


def emit(as_json: bool, data: Any, text: str) -> None:
    """Print ``data`` as JSON, or ``text``.

    Names in both come from untrusted files, so unprintable characters are escaped.
    """
    if as_json:
        say(json.dumps(_finite(data), indent=2, allow_nan=False))
        return
    shown = printable(text, keep="\n")
    # Without a terminal, lines are not wrapped, so that tools can search them.
    say(folded(shown, shutil.get_terminal_size().columns) if sys.stdout is not None and sys.stdout.isatty() else shown)


def folded(text: str, width: int) -> str:
    """Wrap ``text`` at ``width`` characters; continuation lines align with the second column."""
    lines = []
    for line in text.split("\n"):
        label = re.match(r" *(?:\S+(?: \S+)* {2,})?(?=\S)", line)
        indent = min(len(label[0]) if label and label[0] else 2, width // 2)
        lines += textwrap.wrap(line, max(width, 40), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def _finite(data: Any) -> Any:
    """Replace NaN and infinities with None, since JSON has neither."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with columns as wide as their widest cell.

    The first column is left-aligned, the others right-aligned.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def check_spares(path: Path, checkpoint: Path | None, given: Path | None = None) -> None:
    """Refuse an output path that would replace a checkpoint's file or an input.

    Args:
        path: The output file.
        checkpoint: The checkpoint folder, or None.
        given: The input file, or None.

    Raises:
        ConfigError: Writing ``path`` would replace one of them.
    """
    if not path.exists():
        return
    target = Path(os.path.realpath(path))
    if given is not None and target == Path(os.path.realpath(given)):
        raise ConfigError(f"{path} is the input; it is never overwritten")
    if checkpoint is None:
        return
    # Files of download caches are links to files outside of the folder.
    linked = {Path(os.path.realpath(file)) for file in checkpoint.iterdir()}
    if target in linked or target.is_relative_to(os.path.realpath(checkpoint)):
        raise ConfigError(f"{path} is in the checkpoint folder; its files are never overwritten")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` between processes, from reading it until it is written.

    It waits for other holders. The lock is a file next to ``path``, which remains. File systems without such locks
    proceed without one.

    Raises:
        ConfigError: The lock file cannot be made.
    """
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name[:200]}.lock")
    check_writable(lock)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError, NotImplementedError):
            held.enter_context(FileLock(lock))
        yield


@contextlib.contextmanager
def written_folder(path: Path) -> Iterator[None]:
    """Write files into a new or empty folder; on an error, remove them all.

    A folder that did not exist before is removed too.
    """
    is_new = not path.exists()
    try:
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            yield
    except BaseException:
        with contextlib.suppress(OSError):
            for file in path.iterdir():
                shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
            if is_new:
                path.rmdir()
        raise


def seconds_since(start: float) -> float:
    return time.perf_counter() - start


def duration(seconds: float) -> str:
    """Format a time with three digits and a suitable unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def bytes_text(count: int) -> str:
    """Format bytes with a binary unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
