"""JSON of an untrusted folder: bounded, without duplicate keys, an object at the top."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from moe_core._support.atomic_write import as_path
from moe_core._support.open_file import OpenFile
from moe_core.errors import CheckpointError, ConfigError

#: of a config: settings of every expert of a model with 70,000 matrices are some 14 MB
MAX_CONFIG_BYTES = 32 << 20
#: of an index: one that names 200,000 tensors has 26 MB
MAX_INDEX_BYTES = 128 << 20
#: in one file; the header of 100,000 tensors has 800,000.  Python takes 50 bytes and more for each, of 2 in the file
MAX_VALUES = 2_000_000
MAX_DEPTH = 64

# everything up to the next bracket that is not in a string; possessive, so that a broken text takes linear time too
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]|"(?:[^"\\]|\\.)*+")*+[\[\]{}]', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _DuplicateKeyError(f"the key {twice[:200]!r} stands there twice")
    return found


def _check_extent(text: bytes, where: str) -> None:
    """CheckpointError for more values or levels than real files have; parsing them takes memory and stack."""
    values = sum(map(text.count, (b",", b"[", b"{")))
    if values > MAX_VALUES:
        raise CheckpointError(
            f"{where} has {len(text)} bytes and about {values} values, expected at most {MAX_VALUES} values"
        )
    if _is_shallow(text):
        return
    depth = position = 0
    while match := _TO_BRACKET.match(text, position):
        position = match.end()
        depth += 1 if text[position - 1] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where} is nested too deeply, expected at most {MAX_DEPTH} levels")


def _is_shallow(text: bytes) -> bool:
    """Whether it is seen at once that ``text`` has few levels: the header of a file has three, and 10,000 brackets."""
    if b"\\" in text:
        return False
    # every other quote ends a string; each replacement takes the innermost pairs away
    left = b"".join(text.split(b'"')[::2]).translate(None, delete=_NO_BRACKETS)
    for _ in range(4):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return not left


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """The object that ``text`` holds; CheckpointError, naming ``where``, for anything else.

    NaN and Infinity are read, as transformers writes them ("time_step_limit": [0.0, Infinity]); whoever uses a number
    asks for a finite one.
    """
    _check_extent(text, where)
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique)
    except ValueError as error:  # also UnicodeDecodeError and integers of absurd length
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, expected an object")
    return value


def load_object(path: Path, *, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in the JSON file ``path``, which has at most ``most`` bytes."""
    file = OpenFile(path)
    if file.state.size > most:
        raise CheckpointError(f"{path} has {file.state.size} bytes, expected at most {most}")
    return parse_object(file.read(0, file.state.size), str(path))


def load_settings(name: str, path: object) -> dict[str, Any]:
    """The object in a JSON file that a caller names as the argument ``name``.  Raises ConfigError."""
    file = as_path(name, path)
    try:
        return load_object(file)
    except CheckpointError as error:
        raise ConfigError(error.message) from None
