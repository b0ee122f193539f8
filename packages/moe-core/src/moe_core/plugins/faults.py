"""Isolation of plug-in code, so that one broken plug-in does not affect others.

An exception that a plug-in raises, ``SystemExit`` included, becomes a :class:`PluginFault`. The plug-in is disabled and
listed in every report that covers plug-ins. Ctrl-C interrupts plug-in code as usual. A plug-in that ends the process or
never returns cannot be isolated.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from moe_core.errors import PluginWarning, RegistryError

T = TypeVar("T")

_ASIDE = contextvars.ContextVar("moe_core.plugins.faults.printing_aside", default=False)

#: Number of characters of an exception's text that are shown.
_SHOWN = 500


def derives(found: object, base: type) -> bool:
    """Whether ``found`` is a class that has ``base`` among its bases.

    ``issubclass`` with an abstract ``base`` would query every class derived from it. Those include classes of other
    plug-ins, whose metaclasses may raise.

    Args:
        found: Any object.
        base: The base class.

    Returns:
        True for a subclass.
    """
    return isinstance(found, type) and base in inspect.getmro(found)


@dataclass(frozen=True)
class PluginFault:
    """One disabled plug-in, or disabled part of one.

    Attributes:
        kind: "scheme", "backend", "format", "online quantization" or "distribution".
        name: Name of the plug-in ("fp8.mine").
        origin: Distribution that provides it.
        reason: What is wrong, as continuation of "is left out: ".
        cause: Exception that the plug-in raised, if any.
        raises: Type of the error raised if a user asks for the plug-in by name.
    """

    kind: str
    name: str
    origin: str
    reason: str
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    raises: type[RegistryError] = field(default=RegistryError, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.origin} is left out: {self.reason}"

    def error(self) -> RegistryError:
        """Make the error for a user who asks for the plug-in by name.

        Each call returns a new exception, since tracebacks grow.
        """
        error = self.raises(f"{self.kind} {self.name!r} of {self.origin} cannot be used: {self.reason}")
        error.__cause__ = self.cause
        return error

    def as_dict(self) -> dict[str, str]:
        """Return the fault as JSON-compatible dict."""
        return {"kind": self.kind, "name": self.name, "origin": self.origin, "reason": self.reason}


def warn_of(faults: Iterable[PluginFault]) -> None:
    """Issue a PluginWarning for each fault.

    The code that finds the faults calls this once, after it has recorded them.

    Args:
        faults: The faults.
    """
    for fault in faults:
        warnings.warn(str(fault), PluginWarning, stacklevel=3)


@dataclass(frozen=True, eq=False)
class Raised:
    """Exception that plug-in code raised; ``str()`` gives one line."""

    error: BaseException

    def __str__(self) -> str:
        try:
            text = " ".join(str(self.error).split())
        except Exception:  # The text of a plug-in's own exception class is plug-in code too.
            text = ""
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        return f"{type(self.error).__name__}: {shown}" if shown else type(self.error).__name__


def attempt(call: Callable[[], T]) -> T | Raised:
    """Call plug-in code and return an exception that it raises as a value.

    Args:
        call: Plug-in code to run.

    Returns:
        Its result, or the exception that it raised.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr) if _ASIDE.get() else contextlib.nullcontext():
            return call()
    except (Exception, SystemExit) as error:
        return Raised(error)


def split(found: Iterable[T | PluginFault]) -> tuple[tuple[T, ...], tuple[PluginFault, ...]]:
    """Separate working plug-ins from faults, both in the given order.

    Args:
        found: Plug-ins and faults.

    Returns:
        (plug-ins, faults).
    """
    every = tuple(found)
    faults = tuple(one for one in every if isinstance(one, PluginFault))
    return tuple(one for one in every if not isinstance(one, PluginFault)), faults


@contextlib.contextmanager
def printing_aside() -> Iterator[None]:
    """Send the stdout of plug-ins to stderr, for programs whose own stdout is their result."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)
