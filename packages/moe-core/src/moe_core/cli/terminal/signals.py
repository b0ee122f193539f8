"""Signal handling: one line and the conventional exit code at any time.

The signals are Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: message by signal number
NAMES: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if hasattr(signal, "SIGHUP"):
    NAMES[signal.SIGHUP] = "the terminal has gone"


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C; code that cleans up after Ctrl-C handles it too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def number_of(interrupt: KeyboardInterrupt) -> int:
    """Return the signal behind an interrupt.

    Args:
        interrupt: The exception.

    Returns:
        The number of the signal.
    """
    return interrupt.number if isinstance(interrupt, Terminated) else signal.SIGINT


class Ending:
    """How a signal ends the process.

    While torch is imported, the process ends at once: there is nothing to clean up, and exception handlers of a
    half-imported library could swallow an exception. Afterwards a signal raises an exception, so that temporary files
    are removed. A second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.raising = False
        self.received: int | None = None

    def imported(self) -> None:
        """Make signals raise from now on."""
        self.raising = True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Args:
            number: Number of the signal.
            frame: Interrupted frame; not used.
        """
        if not self.raising or self.received is not None:
            with contextlib.suppress(OSError):
                os.write(2, f"moe: {NAMES[number]}\n".encode())
            os._exit(128 + number)
        self.received = number
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def exit_code(self, code: int) -> int:
        """Return the exit code, unless code on the way mistook a signal for its own error.

        Args:
            code: Exit code of the command.

        Returns:
            ``code``, or 128 plus the number of the signal.
        """
        return code if self.received is None else 128 + self.received


@contextlib.contextmanager
def ending_quietly() -> Iterator[Ending]:
    """Handle termination signals within the context; ignored signals stay ignored."""
    ending = Ending()
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in NAMES}
    # A None handler was not installed by Python.
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, ending.handle)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
