"""Files that are written whole or not at all."""

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
    """What goes wrong while ``path`` is written, as ConfigError with its name: what a full disk raises has none."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"{path} can't be written: {why or error}") from error


def as_path(name: str, value: object) -> Path:
    """``value`` as a path.  Raises ConfigError, with the argument's ``name``, for what is none."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise ConfigError(f"{name} is {value!r}, expected a file name: a str or an os.PathLike")
    return Path(value)


def check_writable(path: Path) -> None:
    """Raise ConfigError, before any work is done, where a file can't be written.

    Only regular files are replaced: a pipe or a device would be gone afterwards.  A symbolic link is followed.
    """
    try:
        target = Path(os.path.realpath(path))
        mode = path.stat().st_mode
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
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
    """Write ``content``, so that the file holds all of it or is untouched; a symbolic link stays one.

    Raises ConfigError as :func:`check_writable` does, and where the disk is full.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    # containers that share a folder may have processes of the same number
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
