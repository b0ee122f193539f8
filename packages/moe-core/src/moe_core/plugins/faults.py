"""Isolation of plug-in code, so that one broken plug-in does not affect others.

Whatever a plug-in raises, including ``SystemExit`` and ``KeyboardInterrupt``, becomes a :class:`PluginFault`. The
plug-in is disabled and listed in every report that covers plug-ins. Exceptions raised by signal handlers do not count
as the plug-in's: Ctrl-C interrupts an import as usual. A plug-in that ends the process or never returns cannot be
isolated.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, TypeVar

from moe_core.errors import PluginWarning, RegistryError

T = TypeVar("T")

#: Signals whose handlers usually raise: Ctrl-C, termination, a closed terminal, a time limit.
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGBREAK") if hasattr(signal, name)
)

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
        kind: "scheme", "backend", "format", "online quantisation" or "distribution".
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


class Attempt(Protocol):
    """Function that calls ``call`` and returns its result or the exception it raised."""

    def __call__(self, call: Callable[[], T], /) -> T | Raised: ...


@contextlib.contextmanager
def guard() -> Iterator[Attempt]:
    """Return exceptions of plug-in code as values, except those raised by signal handlers.

    Use as ``with guard() as attempt: attempt(call)``.
    """
    with _signals() as raised:

        def attempt(call: Callable[[], T], /) -> T | Raised:
            try:
                with contextlib.redirect_stdout(sys.stderr) if _ASIDE.get() else contextlib.nullcontext():
                    return call()
            except BaseException as error:
                if raised:
                    raise raised[0] from None
                return Raised(error)

        yield attempt


def attempt(call: Callable[[], T]) -> T | Raised:
    """Call ``call`` once under :func:`guard`.

    Args:
        call: Plug-in code to run.

    Returns:
        Its result, or the exception that it raised.
    """
    with guard() as attempt_:
        return attempt_(call)


@contextlib.contextmanager
def printing_aside() -> Iterator[None]:
    """Redirect what plug-ins print to stderr, for programs whose stdout is their result."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


@contextlib.contextmanager
def _signals() -> Iterator[list[BaseException]]:
    """Collect exceptions raised by signal handlers.

    The exception alone does not distinguish Ctrl-C from a plug-in that raises KeyboardInterrupt, so the handlers are
    wrapped for the duration of the context. Handlers run in the main thread only.
    """
    raised: list[BaseException] = []
    wrapped: list[tuple[int, Any, Any]] = []
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if callable(previous):
                handler = _watched(previous, raised)
                with contextlib.suppress(ValueError):  # Raised in a subinterpreter.
                    signal.signal(number, handler)
                    wrapped.append((number, handler, previous))
    try:
        yield raised
    finally:
        for number, handler, previous in wrapped:
            # Keep a handler that a plug-in installed.
            if signal.getsignal(number) is handler:
                signal.signal(number, previous)


def _watched(
    previous: Callable[[int, FrameType | None], Any], raised: list[BaseException]
) -> Callable[[int, FrameType | None], Any]:
    def handler(number: int, frame: FrameType | None) -> Any:
        try:
            return previous(number, frame)
        except BaseException as error:
            raised.append(error)
            raise

    return handler
