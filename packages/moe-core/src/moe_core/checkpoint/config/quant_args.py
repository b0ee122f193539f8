"""Typed reads of quantization settings in a checkpoint's JSON files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.errors import CheckpointError

#: Upper limit for integers, larger than any group or block of a real model.
_LARGEST = 1 << 24
#: Maximum length of a name, longer than any name of a type, method or format.
LONGEST_NAME = 100


@dataclass(frozen=True)
class QuantEntries:
    """One JSON object with quantization settings.

    Attributes:
        entries: The object.
        where: Its location for messages ("config.json: config_groups.group_0.weights").
    """

    entries: Mapping[str, Any]
    where: str

    def part(self, name: str) -> QuantEntries | None:
        """Return the nested object called ``name``.

        Args:
            name: Key of the object.

        Returns:
            The object with its location, or None if it is absent or null.

        Raises:
            CheckpointError: The value is not an object.
        """
        value = self.entries.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return QuantEntries(value, f"{self.where}.{name}")

    def name_of(self, *names: str) -> str:
        """Return the first of several synonyms that has a value.

        Args:
            *names: Synonyms of one entry.

        Returns:
            The name in use, or the first name if none has a value.
        """
        return next((name for name in names if self.entries.get(name) is not None), names[0])

    def text(self, name: str, default: str | None = None) -> str | None:
        """Return the string called ``name``, or ``default`` if it is absent or null.

        Args:
            name: Key of the entry.
            default: Value of an absent or null entry.

        Returns:
            The string.

        Raises:
            CheckpointError: The value is not a string, or is longer than ``LONGEST_NAME``.
        """
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > LONGEST_NAME:
            raise self.error(name, "a name")
        return value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        """Return the integer called ``name``, or ``default`` if it is absent or null.

        Args:
            name: Key of the entry.
            default: Value of an absent or null entry.
            least: Smallest valid value.

        Returns:
            The integer.

        Raises:
            CheckpointError: The value is not an integer, or out of range.
        """
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise self.error(name, f"an integer of at least {least}")
        return value

    def required(self, name: str) -> None:
        """Raise CheckpointError if an entry is null.

        Some tools use the default for absent entries only.

        Args:
            name: Key of the entry.

        Raises:
            CheckpointError: The entry is null.
        """
        if name in self.entries and self.entries[name] is None:
            raise self.error(name, "a value, or no such entry for the tool's default")

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return the boolean called ``name``, or ``default`` if it is absent or null.

        Args:
            name: Key of the entry.
            default: Value of an absent or null entry.

        Returns:
            The boolean.

        Raises:
            CheckpointError: The value is not a boolean.
        """
        value = self.entries.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def block(self, name: str) -> tuple[int, int] | None:
        """Return a block size, written as [rows, columns] or "128x128".

        Args:
            name: Key of the entry.

        Returns:
            (rows, columns), or None if the entry is absent or null.

        Raises:
            CheckpointError: The value is not a pair of positive integers.
        """
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
        """Return an error that states the value found and the expected one.

        Args:
            name: Key of the entry.
            expected: Description of a valid value.

        Returns:
            The error to raise.
        """
        return CheckpointError(f"{self.where}: {name} is {short(self.entries.get(name))}, expected {expected}")


def one_of(names: Sequence[str]) -> str:
    """Join names for a message: "a, b or c".

    Args:
        names: At least one name.

    Returns:
        The joined text.
    """
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def short(value: object) -> str:
    """Return the repr of a value for a message, truncated to 80 characters.

    Args:
        value: Any value.

    Returns:
        Its repr, with "…" appended if truncated.
    """
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
