"""Processes that compile recorded launches into Triton's disk cache for the parent process.

Triton holds the GIL during part of each compilation, so threads wait for each other. That is fast enough for what one
model needs (`moe_core.kernels.launch.compile_ahead`), but too slow for hundreds of configurations. The processes are
forked, so they inherit the layer. They compile for the GPU's architecture without touching the GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moe_core.cli.terminal.signals import NAMES
from moe_core.kernels.launch.compile_target import Target, compiling_for
from moe_core.kernels.launch.launch import Launch
from moe_core.spec.device import DeviceInfo

#: returns the launches of a task, and the target to compile for; inherited by the forked processes
_INHERITED: list[tuple[Callable[[Any], Iterable[Launch]], Target]] = []


class CompilePool:
    """Pool that compiles the launches of tasks.

    Tasks must be picklable. The pool does nothing if the system cannot fork.

    Args:
        launches_of: Returns the launches of a task.
        device: Device to compile for.
        processes: Number of processes; 0 for one per usable core.
    """

    def __init__(self, launches_of: Callable[[Any], Iterable[Launch]], device: DeviceInfo, processes: int = 0) -> None:
        self._pool = None
        if "fork" not in multiprocessing.get_all_start_methods():
            return
        _INHERITED[:] = [(launches_of, Target(device))]
        count = processes or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        with warnings.catch_warnings():
            # Python warns about forking next to torch's threads. These processes neither compute nor touch the GPU.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pool = multiprocessing.get_context("fork").Pool(count, _handle_signals)

    def compile(self, tasks: Sequence[Any]) -> list[bool]:
        """Compile tasks and return which ones compile; True for all if the system cannot fork."""
        return [True] * len(tasks) if self._pool is None else self._pool.map(_compiles, tasks, chunksize=1)

    def close(self) -> None:
        """Terminate the processes."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None


def _handle_signals() -> None:
    """Ignore Ctrl-C, which the parent handles; other signals silently end the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in NAMES.keys() - {signal.SIGINT}:
        signal.signal(number, signal.SIG_DFL)


def _compiles(task: Any) -> bool:
    launches_of, target = _INHERITED[0]
    try:
        launches = list(launches_of(task))
        with compiling_for(target):
            for one in launches:
                one.kernel[(1,)](*one.arguments.values(), **one.options)
    except Exception:  # Whatever a compiler raises rules out the configuration.
        return False
    return True
