"""Ctrl-C and SIGTERM end a command with one line and the conventional exit code, whenever they come."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: what is said, by number
NAMES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    NAMES[signal.SIGHUP] = "the terminal has gone"


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C: whatever cleans up after Ctrl-C does so here."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def number_of(interrupt: KeyboardInterrupt) -> int:
    """The signal behind an interrupt."""
    return interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT


class Ending:
    """How a signal ends the process.

    While torch is imported, at once: there is nothing to clean up, and an exception out of a half-imported library may
    end in its handlers.  Then by an exception, so that temporary files are removed; a second signal does not wait.
    """

    def __init__(self) -> None:
        self.raising = False
        self.received: int | None = None

    def imported(self) -> None:
        """From here on a signal raises."""
        self.raising = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of every signal."""
        if not self.raising or self.received is not None:
            with contextlib.suppress(OSError):
                os.write(2, f"moe: {NAMES[number]}\n".encode())
            os._exit(128 + number)
        self.received = number
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def exit_code(self, code: int) -> int:
        """``code``, unless a signal came that some code on the way took for an error of its own."""
        return code if self.received is None else 128 + self.received


@contextlib.contextmanager
def ending_quietly() -> Iterator[Ending]:
    """Handlers for the signals that ask a process to end, as long as the context lasts; those ignored stay ignored."""
    ending = Ending()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in NAMES}
    # None: a handler that Python did not install
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, ending.handle)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
