"""Atomic file writes: a file is written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from moe_core.errors import ConfigError


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn write errors into a ConfigError that names ``path``, e.g. for a full disk.

    Args:
        path: The file that is being written.

    Raises:
        ConfigError: The body of the context raised OSError or SafetensorError.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{path} can't be written: {why or error}") from error


def as_path(name: str, value: object) -> Path:
    """Convert an argument to a Path.

    Args:
        name: Name of the argument, for the message.
        value: A str or ``os.PathLike``.

    Returns:
        The path.

    Raises:
        ConfigError: ``value`` is neither.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ConfigError(f"{name} is {value!r}, expected a str or an os.PathLike")
    return Path(value)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before any work is done.

    Only regular files may be replaced: replacing a pipe or a device would remove it. Symbolic links are followed.

    Args:
        path: The file.

    Raises:
        ConfigError: ``path`` cannot be written.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = path.stat().st_mode
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # ValueError: the name contains a NUL character.
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{str(path)!r} can't be written: {why}") from None
    else:
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a folder, expected a file to write")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a regular file (a pipe, a device …), expected a file to write")
    folder = target.parent
    if not folder.is_dir():
        raise ConfigError(f"{path} can't be written: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{path} can't be written: the folder {folder} is not writable")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: it has all of ``content`` afterwards, or is unchanged.

    A symbolic link is kept and its target is replaced.

    Args:
        path: The file.
        content: The new content.

    Raises:
        ConfigError: ``path`` cannot be written (see :func:`check_writable`), or the disk is full.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    # The process id is not unique: containers that share a folder can have equal ids.
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
