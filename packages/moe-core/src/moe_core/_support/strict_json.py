"""Strict JSON parsing for untrusted folders.

The size is limited, duplicate keys are rejected and the top level must be an object.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from moe_core._support.atomic_write import as_path
from moe_core._support.open_file import OpenFile
from moe_core.errors import CheckpointError, ConfigError

#: Size limit of a config. Settings for every expert of a model with 70,000 matrices take about 14 MB.
MAX_CONFIG_BYTES = 32 << 20
#: Size limit of an index. One that lists 200,000 tensors has 26 MB.
MAX_INDEX_BYTES = 128 << 20
#: Limit of values per file. The header of 100,000 tensors has 800,000. Python uses 50 bytes or more per value, even
#: for values of 2 bytes in the file.
MAX_VALUES = 2_000_000
MAX_DEPTH = 64

# Matches up to the next bracket outside of strings. Possessive, so that malformed text takes linear time too.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]|"(?:[^"\\]|\\.)*+")*+[\[\]{}]', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


class _DuplicateKeyError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise _DuplicateKeyError(f"duplicate key {twice[:200]!r}")
    return found


def _check_extent(text: bytes, where: str) -> None:
    """Raise CheckpointError for more values or levels than real files have.

    Parsing such a file would take too much memory or stack.
    """
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
    """Whether a quick test shows that ``text`` has few nesting levels.

    A file header has three levels and about 10,000 brackets.
    """
    if b"\\" in text:
        return False
    # Every other quote ends a string. Each replacement removes the innermost pairs.
    left = b"".join(text.split(b'"')[::2]).translate(None, delete=_NO_BRACKETS)
    for _ in range(4):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return not left


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    NaN and Infinity are accepted, because transformers writes them ("time_step_limit": [0.0, Infinity]). Code that
    uses a number must check that it is finite.

    Args:
        text: The JSON text.
        where: Source of the text, for the message.

    Returns:
        The object.

    Raises:
        CheckpointError: ``text`` is not valid JSON, not an object, or exceeds a limit.
    """
    _check_extent(text, where)
    try:
        value = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique)
    except ValueError as error:  # Includes UnicodeDecodeError and integers of excessive length.
        raise CheckpointError(f"{where} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds a JSON {type(value).__name__}, expected an object")
    return value


def load_object(path: Path, *, most: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        path: The file.
        most: Maximum size in bytes.

    Returns:
        The object.

    Raises:
        CheckpointError: The file cannot be read, is too large or is invalid.
    """
    file = OpenFile(path)
    if file.state.size > most:
        raise CheckpointError(f"{path} has {file.state.size} bytes, expected at most {most}")
    return parse_object(file.read(0, file.state.size), str(path))


def load_settings(name: str, path: object) -> dict[str, Any]:
    """Read a JSON file that the caller passes as an argument.

    Args:
        name: Name of the argument, for the message.
        path: The file.

    Returns:
        The object.

    Raises:
        ConfigError: The file cannot be read, is too large or is invalid.
    """
    file = as_path(name, path)
    try:
        return load_object(file)
    except CheckpointError as error:
        raise ConfigError(error.message) from None
