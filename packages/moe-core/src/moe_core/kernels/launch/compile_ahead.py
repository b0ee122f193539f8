"""Compile the kernels of recorded launches, several at a time, and load them onto the GPU.

Triton holds Python's lock for the first of a compilation's stages alone, a sixth of the time: threads are enough, and
unlike processes they need no memory of the GPU, nor anything that can be sent to them.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moe_core.kernels.launch.launch import Launch

#: told the number of kernels that are ready, and of all
Progress = Callable[[int, int], None]


def compile_ahead(launches: Iterable[Launch], *, progress: Progress | None = None, threads: int | None = None) -> int:
    """Compile what ``launches`` need on the current GPU, and load it; the number of different kernels.

    ``threads``: by default one for each core that this process may use.  What a kernel fails with is raised.
    """
    kernels = compile_in_threads(distinct(launches), progress=progress, threads=threads)
    for kernel in kernels:
        # loading may wait for the GPU, which the capture of a graph does not allow
        kernel.run  # noqa: B018 - reading it loads the kernel
    return len(kernels)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One of each launch that has a compiled kernel of its own."""
    return list({one.compiled_for(): one for one in launches}.values())


def compile_in_threads(
    launches: Sequence[Launch],
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore_errors: bool = False,
) -> list[Any]:
    """Triton's compiled kernel of each of ``launches``, not loaded; ``ignore_errors``: None where one fails."""
    # Triton says by a context variable that it compiles in threads, and some versions leave it set after an error
    context = contextvars.Context()
    compiled: list[Any] = context.run(_compile, launches, progress, threads or _cores(), ignore_errors)
    return compiled


def _compile(launches: Sequence[Launch], progress: Progress | None, threads: int, ignore_errors: bool) -> list[Any]:
    import triton

    def attempt(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception:
            if not ignore_errors:
                raise
            return None

    kernels = []
    with (
        _Counting(threads, len(launches), progress) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=ignore_errors),
    ):
        for one in launches:
            before = pool.submitted
            warm_up = functools.partial(one.kernel.warmup, *one.arguments.values(), grid=(1,), **one.options)
            kernels.append(attempt(warm_up))
            if pool.submitted == before:
                pool.count()  # compiled before
    return [attempt(kernel.result) if hasattr(kernel, "result") else kernel for kernel in kernels]


class _Counting(ThreadPoolExecutor):
    """Tells ``progress`` of each kernel that is ready."""

    def __init__(self, threads: int, total: int, progress: Progress | None) -> None:
        super().__init__(threads, thread_name_prefix="moe_core_compile")
        self.submitted = 0
        self._done, self._total, self._progress = 0, total, progress

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.submitted += 1
        future = super().submit(fn, *args, **kwargs)
        future.add_done_callback(lambda _: self.count())
        return future

    def count(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
