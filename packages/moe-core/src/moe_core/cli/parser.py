"""An argument parser whose refusals are one line, and name what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from moe_core.cli.terminal.console import complain


class Paragraphs(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width; lines that start with spaces stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = (p if p.startswith(" ") or "\n  " in p else textwrap.fill(p, width) for p in text.split("\n\n"))
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Errors go to stderr without the usage; exit code 2."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: {message} ({self.prog} --help)")
        raise SystemExit(2)

    def refuse(self, extras: list[str]) -> NoReturn:
        """Refuse arguments that no command has."""
        first = extras[0]
        if not first.startswith("-"):
            self.error(f"unexpected argument {shown(first)}")
        options = [option for action in self._actions for option in action.option_strings]
        self.error(f"unknown option {shown(first)}{meant(first.partition('=')[0], options)}")


def meant(name: str, known: Iterable[str]) -> str:
    """ "; did you mean --tokens?", or nothing where no known one is close."""
    close = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def shown(text: str) -> str:
    """An argument as an error quotes it."""
    return repr(text if len(text) <= 80 else f"{text[:60]}…")


def whole(text: str) -> int:
    """An integer of an argument."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {shown(text)}") from None


def seed(text: str) -> int:
    """A seed that torch accepts."""
    number = whole(text)
    if not -(2**63) <= number < 2**64:
        raise argparse.ArgumentTypeError(f"expected an integer from {-(2**63)} to {2**64 - 1}, got {shown(text)}")
    return number


def path(text: str) -> Path:
    """A path of an argument; an empty one would be the folder that the command is called in."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def seconds(text: str) -> float:
    """A number of an argument."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {shown(text)}") from None


def one_of(*names: str) -> Callable[[str], str]:
    """A name of an argument, of a few."""

    def choose(text: str) -> str:
        if text.lower() in names:
            return text.lower()
        raise argparse.ArgumentTypeError(
            f"expected {', '.join(names[:-1])} or {names[-1]}, got {shown(text)}{meant(text.lower(), names)}"
        )

    return choose
