"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
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


def write_whole(path: Path, content: bytes) -> None:
    """Write ``content``, so that the file holds all of it or is untouched; a symbolic link stays one."""
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
