"""Plug-ins' code, run so that the fault of one is nobody else's.

Whatever a plug-in raises, ``SystemExit`` and ``KeyboardInterrupt`` too, becomes a :class:`PluginFault`: it is left out,
and named wherever somebody may look for it.  What a signal handler raises meanwhile is not the plug-in's: Ctrl-C
interrupts an import as it always does.  A plug-in that ends the process or never returns cannot be held here.
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

#: signals whose handlers end what runs by raising: Ctrl-C, a request to end, a closed terminal, a time limit
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGBREAK") if hasattr(signal, name)
)

_ASIDE = contextvars.ContextVar("moe_core.plugins.faults.printing_aside", default=False)

#: so much of an exception's text is shown
_SHOWN = 500


def derives(found: object, base: type) -> bool:
    """Whether ``found`` is a class that has ``base`` among its bases.

    ``issubclass`` of an abstract ``base`` asks every class derived from it, those of other plug-ins too, whose
    metaclasses may raise.
    """
    return isinstance(found, type) and base in inspect.getmro(found)


@dataclass(frozen=True)
class PluginFault:
    """One thing that was left out.

    ``kind``: "scheme", "backend", "format", "online quantisation" or "distribution"; ``name`` that it is known by
    ("fp8.mine"); ``origin``: the distribution that brings it; ``reason``: what is wrong, after "is left out: ".
    ``cause`` is what it raised, if it did; ``raises`` the error for those who ask for it by name.
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
        """What asking for it by name raises; a new one each time, since tracebacks grow."""
        error = self.raises(f"{self.kind} {self.name!r} of {self.origin} cannot be used: {self.reason}")
        error.__cause__ = self.cause
        return error

    def as_dict(self) -> dict[str, str]:
        """JSON-ready form."""
        return {"kind": self.kind, "name": self.name, "origin": self.origin, "reason": self.reason}


def warn_of(faults: Iterable[PluginFault]) -> None:
    """A PluginWarning for each; whoever found them calls this once, after they are on record."""
    for fault in faults:
        warnings.warn(str(fault), PluginWarning, stacklevel=3)


@dataclass(frozen=True, eq=False)
class Raised:
    """What a plug-in's code raised; ``str()`` in one line."""

    error: BaseException

    def __str__(self) -> str:
        try:
            text = " ".join(str(self.error).split())
        except Exception:  # the text of a plug-in's own exception class is its code too
            text = ""
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        return f"{type(self.error).__name__}: {shown}" if shown else type(self.error).__name__


class Attempt(Protocol):
    """Calls something, and returns its result or what it raised."""

    def __call__(self, call: Callable[[], T], /) -> T | Raised: ...


@contextlib.contextmanager
def guard() -> Iterator[Attempt]:
    """``with guard() as attempt: attempt(call)`` returns what ``call`` raises, but not what signal handlers raise."""
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
    """One call under :func:`guard`."""
    with guard() as attempt_:
        return attempt_(call)


@contextlib.contextmanager
def printing_aside() -> Iterator[None]:
    """Send what plug-ins print to stderr meanwhile: for programs whose stdout is their result."""
    token = _ASIDE.set(True)
    try:
        yield
    finally:
        _ASIDE.reset(token)


@contextlib.contextmanager
def _signals() -> Iterator[list[BaseException]]:
    """Collect what signal handlers raise.

    The exception alone does not tell Ctrl-C from a plug-in that raises KeyboardInterrupt, so the handlers are wrapped
    meanwhile.  They run in the main thread only.
    """
    raised: list[BaseException] = []
    wrapped: list[tuple[int, Any, Any]] = []
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            previous = signal.getsignal(number)
            if callable(previous):
                handler = _watched(previous, raised)
                with contextlib.suppress(ValueError):  # an interpreter beside the main one
                    signal.signal(number, handler)
                    wrapped.append((number, handler, previous))
    try:
        yield raised
    finally:
        for number, handler, previous in wrapped:
            # a plug-in that installed a handler of its own keeps it
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
