"""Processes that compile recorded launches into Triton's cache on disk, for a process that then finds them there.

Triton holds Python's lock for a part of each compilation, which threads wait for: enough for what a model needs once
(`moe_core.kernels.launch.compile_ahead`), too slow for hundreds of configurations.  The processes are forked, so that
they know the layer, and compile for the GPU's architecture without touching the GPU.
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

#: what a forked process asks for the launches of a task, and compiles for
_INHERITED: list[tuple[Callable[[Any], Iterable[Launch]], Target]] = []


class CompilePool:
    """``launches_of`` a task, which can be pickled, compiled for ``device``; nothing where a system cannot fork."""

    def __init__(self, launches_of: Callable[[Any], Iterable[Launch]], device: DeviceInfo, processes: int = 0) -> None:
        self._pool = None
        if "fork" not in multiprocessing.get_all_start_methods():
            return
        _INHERITED[:] = [(launches_of, Target(device))]
        count = processes or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        with warnings.catch_warnings():
            # of forking beside torch's threads: these processes neither compute nor touch the GPU
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pool = multiprocessing.get_context("fork").Pool(count, _handle_signals)

    def compile(self, tasks: Sequence[Any]) -> list[bool]:
        """Which of ``tasks`` compile; all are said to where a system cannot fork."""
        return [True] * len(tasks) if self._pool is None else self._pool.map(_compiles, tasks, chunksize=1)

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
            self._pool = None


def _handle_signals() -> None:
    """Ctrl-C is for the process that waits; what ends one of these ends it at once, without the command's words."""
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
    except Exception:  # whatever a compiler raises: it is a reason against the configuration
        return False
    return True
