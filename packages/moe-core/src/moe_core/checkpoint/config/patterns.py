"""Match module names against untrusted patterns with bounded time and memory.

The patterns come from a checkpoint's JSON files, whose author controls both the pattern and the names. With Python's
``re``, a match could then take years or gigabytes. All tools' patterns are therefore matched here, with these limits:

- Matching uses ``regex``, which supports a timeout. A linear-time engine would need none, but RE2 lacks look-around,
  which configs use (``^(?!.*gate)``).
- The length of patterns and names is limited. So is the product of counts such as ``{1,100}``, which are expanded when
  a pattern is compiled.
- Patterns that ``re`` rejects, or interprets differently from ``regex``, are refused, because the tools' own loaders
  use ``re``.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from moe_core.checkpoint.config.quant_args import short
from moe_core.errors import CheckpointError

#: Time limit for all matches of one config together; real configs take milliseconds.
SECONDS = 5.0
#: Maximum number of characters of a pattern, and of a name to match.
LONGEST = 1000
#: Maximum product of all counts of a pattern.
LARGEST_COUNT = 10_000

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
# Nested sets and set operations, which future versions of re may interpret differently.
_SET_OF_SETS = re.compile(r"\[\^?\[|--|&&|~~|\|\|")


class NamePatterns:
    """The patterns of one config, with a shared time limit.

    Args:
        seconds: Time limit for all matches together, starting now.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds

    def regular(self, pattern: str, where: str) -> NamePattern:
        """Compile a regular expression.

        Args:
            pattern: The expression.
            where: File and key that state it ("config.json: dynamic: the key"), for messages.

        Returns:
            The compiled pattern.

        Raises:
            CheckpointError: The pattern is invalid or may be too expensive to match.
        """
        return self._compiled(pattern, where, pattern)

    def wildcard(self, pattern: str, where: str) -> NamePattern:
        """Compile a wildcard pattern.

        Args:
            pattern: ``*`` matches any characters, ``?`` one, and ``[abc]`` one of a set.
            where: File and key that state it, for messages.

        Returns:
            The compiled pattern.

        Raises:
            CheckpointError: The pattern is invalid or may be too expensive to match.
        """
        return self._compiled(pattern, where, translate(pattern) if len(pattern) <= LONGEST else pattern)

    def _compiled(self, pattern: str, where: str, expression: str) -> NamePattern:
        import regex

        try:
            _check(pattern, expression)
            re.compile(expression)
            compiled = regex.compile(expression)
        except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise CheckpointError(f"{where} {short(pattern)} is not a valid regular expression: {error}") from None
        return NamePattern(pattern, where, compiled, self)

    def left(self) -> float:
        """Return the remaining time in seconds."""
        return self._deadline - time.monotonic()


@dataclass(frozen=True, eq=False)
class NamePattern:
    """A compiled pattern for module names.

    Matching raises CheckpointError if it exceeds the limits.

    Attributes:
        text: The pattern as stated.
        where: File and key that state it, for messages.
    """

    text: str
    where: str
    _compiled: Any
    _owner: NamePatterns

    def match(self, name: str) -> bool:
        """Return whether the pattern matches at the start of a name, as :func:`re.match`.

        Args:
            name: Name of a module.

        Returns:
            True if it matches.

        Raises:
            CheckpointError: The name is too long, or the time limit is exceeded.
        """
        return self._try(self._compiled.match, name)

    def search(self, name: str) -> bool:
        """Return whether the pattern matches anywhere in a name, as :func:`re.search`.

        Args:
            name: Name of a module.

        Returns:
            True if it matches.

        Raises:
            CheckpointError: The name is too long, or the time limit is exceeded.
        """
        return self._try(self._compiled.search, name)

    def _try(self, matcher: Any, name: str) -> bool:
        if len(name) > LONGEST:
            raise CheckpointError(
                f"{self.where} {short(self.text)} cannot be matched against {short(name)}: the name has "
                f"{len(name)} characters, expected at most {LONGEST}"
            )
        left = self._owner.left()
        try:
            if left > 0:
                return matcher(name, timeout=left) is not None
        except TimeoutError:
            pass
        except (MemoryError, RecursionError) as error:
            raise CheckpointError(
                f"{self.where} {short(self.text)} cannot be matched against {name}: {error!r}"
            ) from None
        raise CheckpointError(
            f"{self.where} {short(self.text)} takes more than {self._owner.seconds:g} s to match names like "
            f"{name}; expected a pattern without nested repetitions"
        )


def _check(pattern: str, expression: str) -> None:
    """Raise ``re.error`` if a pattern is too large, or ``re`` and ``regex`` read it differently."""
    if len(pattern) > LONGEST:
        raise re.error("it is too long")
    if pattern is not expression:
        return
    plain = _ESCAPED.sub("", pattern)
    if _SET_OF_SETS.search(plain):
        raise re.error("nested sets are not supported")
    if _COUNT.sub("", plain).count("{"):
        raise re.error("'{' must begin a count")
    largest = 1
    for counts in _COUNT.findall(plain):
        if not any(counts):
            raise re.error("it has a count without a number")
        largest *= max(1, *(int(count) for count in counts if count))
        if largest > LARGEST_COUNT:
            raise re.error(f"its counts multiply to more than {LARGEST_COUNT}")
