"""What commands print: text or JSON on stdout, progress on a terminal's stderr; files and folders that they write."""

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

from moe_core._support.atomic_write import check_writable, writing
from moe_core.cli.terminal.console import progress as progress
from moe_core.cli.terminal.console import say
from moe_core.errors import ConfigError, printable


def emit(as_json: bool, data: Any, text: str) -> None:
    """Print ``data`` as JSON, or ``text``; names in them come from files that nobody has looked at."""
    if as_json:
        say(json.dumps(_finite(data), indent=2, allow_nan=False))
        return
    shown = printable(text, keep="\n")
    # elsewhere a line stays one, for whoever searches in it
    say(folded(shown, shutil.get_terminal_size().columns) if sys.stdout is not None and sys.stdout.isatty() else shown)


def folded(text: str, width: int) -> str:
    """``text`` with lines of ``width`` characters at most; what goes on stands below the line's second column."""
    lines = []
    for line in text.split("\n"):
        label = re.match(r" *(?:\S+(?: \S+)* {2,})?(?=\S)", line)
        indent = min(len(label[0]) if label and label[0] else 2, width // 2)
        lines += textwrap.wrap(line, max(width, 40), subsequent_indent=" " * indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def _finite(data: Any) -> Any:
    """``data`` with None for NaN and infinities, which JSON has not."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is aligned left, the others right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def check_spares(path: Path, checkpoint: Path | None, given: Path | None = None) -> None:
    """Raise ConfigError where writing ``path`` would replace a file of a checkpoint folder, or the ``given`` input."""
    if not path.exists():
        return
    target = Path(os.path.realpath(path))
    if given is not None and target == Path(os.path.realpath(given)):
        raise ConfigError(f"{path} is the input itself; it is never replaced")
    if checkpoint is None:
        return
    # files of download caches are links to what lies outside of the folder
    linked = {Path(os.path.realpath(file)) for file in checkpoint.iterdir()}
    if target in linked or target.is_relative_to(os.path.realpath(checkpoint)):
        raise ConfigError(f"{path} is a file of the checkpoint itself; files in its folder are never replaced")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process is in here with the same ``path`` while it lasts: what is read of it stays until it is written.

    Waits for the others.  The lock is a file beside it, which is gone afterwards; without one where the system, or the
    file system, has no such locks.  Raises ConfigError where that file can't be made.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    target = Path(os.path.realpath(path))
    lock = target.with_name(f".{target.name[:200]}.lock")
    while True:
        check_writable(lock)
        with writing(path):
            descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            # some network file systems refuse
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_at(descriptor, lock):
                # the one before removed it: others lock the next one
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
            return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def written_folder(path: Path) -> Iterator[None]:
    """``path``, a new or an empty folder, while files are written into it: it is left with all of them or as it was."""
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
    """A time with three digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def bytes_text(count: int) -> str:
    """Bytes with a binary unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
