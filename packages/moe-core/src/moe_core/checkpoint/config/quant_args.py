"""Typed reads from the quantisation part of a checkpoint's JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.errors import CheckpointError

#: larger than any group or block that a model can have
_LARGEST = 1 << 24
#: longer than any word that stands for a type, method or format
LONGEST_NAME = 100


@dataclass(frozen=True)
class QuantEntries:
    """One JSON object and where it stands ("config.json: config_groups.group_0.weights"), for messages."""

    entries: Mapping[str, Any]
    where: str

    def part(self, name: str) -> QuantEntries | None:
        """The object under ``name``; None where it is absent or null."""
        value = self.entries.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return QuantEntries(value, f"{self.where}.{name}")

    def name_of(self, *names: str) -> str:
        """The first of ``names``, which mean the same, that has a value; the first where none has."""
        return next((name for name in names if self.entries.get(name) is not None), names[0])

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > LONGEST_NAME:
            raise self.error(name, "a name")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def required(self, name: str) -> None:
        """CheckpointError for an entry that is there and null, where leaving it out alone means the default."""
        if name in self.entries and self.entries[name] is None:
            raise self.error(name, "a value, or no such entry for the tool's default")

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """[rows, columns], also written "128x128"; None where it is absent or null."""
        value = self.entries.get(name)
        if value is None:
            return None
        parts: list[Any] = value if isinstance(value, list) else []
        if isinstance(value, str):
            parts = [int(part) if part.isdecimal() and len(part) < 9 else part for part in value.lower().split("x")]
        if len(parts) != 2 or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 < n <= 1 << 16 for n in parts
        ):
            raise self.error(name, "[rows, columns]")
        return parts[0], parts[1]

    def error(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {name} is {short(self.entries.get(name))}, expected {expected}")


def one_of(names: Sequence[str]) -> str:
    """ "a, b or c", for a message."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def short(value: object) -> str:
    """``value`` for a message, whatever its length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
