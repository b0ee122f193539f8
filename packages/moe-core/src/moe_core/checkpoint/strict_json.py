"""JSON of an untrusted folder: bounded, without duplicate keys, an object at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_core.checkpoint.open_file import OpenFile
from moe_core.errors import CheckpointError

#: larger than any real index (DeepSeek-V3's names 91,000 tensors in 9 MB)
MAX_JSON_BYTES = 256 << 20


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(f"the key {key[:200]!r} stands there twice")
        found[key] = value
    return found


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The object that ``text`` holds; CheckpointError, naming ``where``, for anything else."""
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{where} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError and integers of absurd length
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, expected an object")
    return value


def load_object(path: Path) -> dict[str, Any]:
    """The object in the JSON file ``path``."""
    file = OpenFile(path)
    if file.state.size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {file.state.size} bytes, expected a JSON file of at most {MAX_JSON_BYTES}")
    return parse_object(file.read(0, file.state.size), str(path))
