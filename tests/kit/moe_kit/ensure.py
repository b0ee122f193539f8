"""Assertion helper of the test suites."""

from __future__ import annotations


def ensure(holds: bool, what: object) -> None:
    """Raise AssertionError unless a condition holds.

    Args:
        holds: The condition.
        what: Content of the error.

    Raises:
        AssertionError: The condition does not hold.
    """
    if not holds:
        raise AssertionError(what)
