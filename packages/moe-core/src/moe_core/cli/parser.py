"""Argument parser whose errors are one line with a suggestion."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from moe_core.cli.terminal.console import complain


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

    def refuse(self, extras: list[str]) -> NoReturn:
        """Refuse unknown arguments.

        Args:
            extras: Arguments that the command does not take.

        Raises:
            SystemExit: Always.
        """
        first = extras[0]
        if not first.startswith("-"):
            self.error(f"unexpected argument {shown(first)}")
        options = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown option {shown(first)}{meant(first.partition('=')[0], options)}")


def meant(name: str, known: Iterable[str]) -> str:
    """Return a suggestion such as "; did you mean --tokens?", or "" if no known name is close.

    Args:
        name: The unknown name.
        known: Known names.

    Returns:
        The suggestion.
    """
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


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


def seed(text: str) -> int:
    """Parse a seed.

    Args:
        text: The argument.

    Returns:
        An integer that torch accepts as a seed.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not such an integer.
    """
    number = whole(text)
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"expected an integer from {-(2**63)} to {2**64 - 1}, got {shown(text)}")
    return number


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


def seconds(text: str) -> float:
    """Parse a number.

    Args:
        text: The argument.

    Returns:
        The number.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {shown(text)}") from None


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
            f"expected {', '.join(names[:-1])} or {names[-1]}, got {shown(text)}{meant(text.lower(), names)}"
        )

    return choose
