"""Argument parser whose errors are one line with a suggestion."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moe_core.cli.terminal.console import complain
from moe_core.errors import did_you_mean

MOST_TOKENS = 2**40
LARGEST_SIZE = 2**24

N = TypeVar("N", int, float)


class Paragraphs(argparse.HelpFormatter):
    """Formatter that wraps paragraphs to the terminal's width and keeps indented lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = (p if p.startswith(" ") or "\n  " in p else textwrap.fill(p, width) for p in text.split("\n\n"))
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Parser that prints errors to stderr without the usage and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message} ({self.prog} --help)")
        raise SystemExit(2)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments, and refuse unknown ones.

        Args:
            args: Arguments; None for those of the process.
            namespace: Object that receives them.

        Returns:
            The namespace, and an empty list.

        Raises:
            SystemExit: An argument is invalid or unknown.
        """
        found, extras = super().parse_known_args(args, namespace)
        if extras and extras[0].startswith("-"):
            options = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown option {shown(extras[0])}{did_you_mean(extras[0].partition('=')[0], options)}")
        if extras:
            self.error(f"unexpected argument {shown(extras[0])}")
        return found, extras


def shown(text: str) -> str:
    """Quote an argument for an error, shortened if it is long.

    Args:
        text: The argument.

    Returns:
        Its quoted form.
    """
    return repr(text if len(text) <= 80 else f"{text[:60]}…")


def whole(text: str) -> int:
    """Parse an integer.

    Args:
        text: The argument.

    Returns:
        The integer.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not an integer.
    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {shown(text)}") from None


def path(text: str) -> Path:
    """Parse a path; an empty one is refused, since it would mean the current folder.

    Args:
        text: The argument.

    Returns:
        The path.

    Raises:
        argparse.ArgumentTypeError: ``text`` is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def number(text: str) -> float:
    """Parse a finite number.

    Args:
        text: The argument.

    Returns:
        The number.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a finite number.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"expected a number, got {shown(text)}")
    return found


def positive(text: str) -> float:
    """Parse a positive number.

    Args:
        text: The argument.

    Returns:
        The number.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a positive number.
    """
    found = number(text)
    if found <= 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {shown(text)}")
    return found


def at_least(least: N, most: N | None = None) -> Callable[[str], N]:
    """Make a parser for numbers in a range.

    Args:
        least: Smallest number; integers if it is one.
        most: Largest number; None for no limit.

    Returns:
        A function that returns the number or raises argparse.ArgumentTypeError.
    """

    kind = type(least)

    def parse(text: str) -> N:
        found = kind(whole(text) if kind is int else number(text))
        if found < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {shown(text)}")
        if most is not None and found > most:
            raise argparse.ArgumentTypeError(f"expected {most} or less, got {shown(text)}")
        return found

    return parse


def token_counts(text: str) -> list[int]:
    """Parse numbers of tokens.

    Args:
        text: Distinct positive integers, separated by commas.

    Returns:
        The integers, in the given order.

    Raises:
        argparse.ArgumentTypeError: ``text`` is anything else.
    """
    return [at_least(1, MOST_TOKENS)(item) for item in _distinct(text)]


def device_names(text: str) -> list[str]:
    """Parse names of devices.

    Args:
        text: Distinct names, separated by commas.

    Returns:
        The names.

    Raises:
        argparse.ArgumentTypeError: A name is empty or repeated.
    """
    return _distinct(text)


def shape(text: str) -> tuple[int, ...]:
    """Parse the sizes of a layer.

    Args:
        text: Experts, experts per token, hidden size and intermediate size, separated by commas.

    Returns:
        The four integers.

    Raises:
        argparse.ArgumentTypeError: ``text`` is anything else, or a size is too large.
    """
    sizes = text.split(",")
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"expected four integers E,k,K,N, e.g. 128,8,2048,768; got {shown(text)}")
    return tuple(at_least(-LARGEST_SIZE, LARGEST_SIZE)(size) for size in sizes)


def _distinct(text: str) -> list[str]:
    """Split a list with commas, whose items are neither empty nor repeated."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise argparse.ArgumentTypeError(f"expected items with commas between, got {shown(text)}")
    twice = next((item for place, item in enumerate(items) if item in items[:place]), None)
    if twice is not None:
        raise argparse.ArgumentTypeError(f"expected each item once, got {shown(twice)} twice in {shown(text)}")
    return items


def one_of(*names: str) -> Callable[[str], str]:
    """Make a parser for one of a few names, in any case.

    Args:
        *names: Accepted values in lower case.

    Returns:
        A function that returns the name in lower case or raises argparse.ArgumentTypeError.
    """

    def choose(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(names[:-1])} or {names[-1]}, got {shown(text)}{did_you_mean(text.lower(), names)}"
        )

    return choose
