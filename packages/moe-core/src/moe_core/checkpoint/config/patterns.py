"""Patterns from a checkpoint's JSON files, which choose modules by name: matched within bounds.

Whoever writes a config chooses both the pattern and the names that it is tried on, and Python's own matcher may then
take years, or gigabytes.  Every tool's patterns are therefore matched here:

- by ``regex``, whose matches take a time limit.  A linear-time engine would need none, but RE2 has no look-around,
  which configs use (``^(?!.*gate)``).
- patterns and names have a greatest length, and counts like ``{1,100}``, which are expanded when a pattern is
  compiled, a greatest product
- what ``re`` refuses, or reads otherwise than ``regex``, is refused: the tools' own loaders use ``re``
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from moe_core.checkpoint.config.quant_args import short
from moe_core.errors import CheckpointError

#: what all matches of one reading may take together; real ones take milliseconds
SECONDS = 5.0
#: characters of a pattern, and of a name that patterns are tried on
LONGEST = 1000
#: product of all counts of a pattern
LARGEST_COUNT = 10_000

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
# sets in sets and operations on sets, which later versions of re may read otherwise
_SET_OF_SETS = re.compile(r"\[\^?\[|--|&&|~~|\|\|")


class NamePatterns:
    """The patterns of one reading of a config; ``seconds`` bounds what all their matches take."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def regular(self, pattern: str, where: str) -> NamePattern:
        """A regular expression; ``where`` names the file and key that state it ("config.json: dynamic: the key").

        Raises CheckpointError for what is no such pattern, or may cost too much.
        """
        return self._compiled(pattern, where, pattern)

    def wildcard(self, pattern: str, where: str) -> NamePattern:
        """A pattern in which ``*`` stands for any characters, ``?`` for one and ``[abc]`` for one of them."""
        return self._compiled(pattern, where, translate(pattern) if len(pattern) <= LONGEST else pattern)

    def _compiled(self, pattern: str, where: str, expression: str) -> NamePattern:
        import regex

        try:
            _check(pattern, expression)
            re.compile(expression)
            compiled = regex.compile(expression)
        except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{where} {short(pattern)} is no pattern: {error}") from None
        return NamePattern(pattern, where, compiled, self)

    def left(self) -> float:
        """Seconds that remain."""
        return self._deadline - time.monotonic()


@dataclass(frozen=True, eq=False)
class NamePattern:
    """A pattern that is tried on modules' names; CheckpointError where that takes too long."""

    text: str
    where: str
    _compiled: Any
    _owner: NamePatterns

    def match(self, name: str) -> bool:
        """Whether the pattern fits ``name`` from its start (:func:`re.match`)."""
        return self._try(self._compiled.match, name)

    def search(self, name: str) -> bool:
        """Whether the pattern fits any part of ``name`` (:func:`re.search`)."""
        return self._try(self._compiled.search, name)

    def _try(self, matcher: Any, name: str) -> bool:
        if len(name) > LONGEST:
            raise CheckpointError(
                f"{self.where} {short(self.text)} can't be tried on {short(name)}: the name has {len(name)} "
                f"characters, at most {LONGEST} are expected"
            )
        left = self._owner.left()
        try:
            if left > 0:
                return matcher(name, timeout=left) is not None
        except TimeoutError:
            pass
        except (MemoryError, RecursionError) as error:
            raise CheckpointError(f"{self.where} {short(self.text)} can't be tried on {name}: {error!r}") from None
        raise CheckpointError(
            f"{self.where} {short(self.text)} takes more than {self._owner.seconds:g} s to be tried on names like "
            f"{name}: expected a pattern without repetitions inside repetitions"
        )


def _check(pattern: str, expression: str) -> None:
    """``re.error`` for a pattern that is too large, or that ``re`` and ``regex`` read differently."""
    if len(pattern) > LONGEST:
        raise re.error("it is too long")
    if pattern is not expression:
        return
    plain = _ESCAPED.sub("", pattern)
    if _SET_OF_SETS.search(plain):
        raise re.error("it has sets within sets")
    if _COUNT.sub("", plain).count("{"):
        raise re.error("it has a { that begins no count")
    largest = 1
    for counts in _COUNT.findall(plain):
        if not any(counts):
            raise re.error("it has a count without a number")
        largest *= max(1, *(int(count) for count in counts if count))
        if largest > LARGEST_COUNT:
            raise re.error(f"its counts multiply to more than {LARGEST_COUNT}")
