"""What the kits raise."""

from __future__ import annotations


def ensure(holds: bool, what: object) -> None:
    """AssertionError with ``what`` unless it holds."""
    if not holds:
        raise AssertionError(what)
