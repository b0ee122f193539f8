"""Compile the kernels of recorded launches in parallel, and load them onto the GPU.

Triton holds the GIL only in the first compilation stage, a sixth of the time, so threads suffice. Unlike processes
they need no extra GPU memory, and nothing has to be pickled.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from moe_core.kernels.launch.launch import Launch

#: callback that receives the number of compiled kernels and the total
Progress = Callable[[int, int], None]


def compile_ahead(launches: Iterable[Launch], *, progress: Progress | None = None, threads: int | None = None) -> int:
    """Compile the kernels of ``launches`` for the current GPU, and load them.

    Args:
        launches: Recorded launches.
        progress: Callback for the number of compiled kernels and the total.
        threads: Number of threads; by default one for each core that this process may use.

    Returns:
        Number of distinct kernels.

    Raises:
        Exception: Any exception of a compilation.
    """
    kernels = compile_in_threads(distinct(launches), progress=progress, threads=threads)
    for kernel in kernels:
        # loading may synchronize with the GPU, which is not allowed during graph capture
        kernel.run  # noqa: B018 - reading it loads the kernel
    return len(kernels)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Remove launches that run the same compiled kernel as another one.

    Args:
        launches: Recorded launches.

    Returns:
        One launch per compiled kernel.
    """
    return list({one.compiled_for(): one for one in launches}.values())


def compile_in_threads(
    launches: Sequence[Launch],
    *,
    progress: Progress | None = None,
    threads: int | None = None,
    ignore_errors: bool = False,
) -> list[Any]:
    """Compile the kernel of each launch without loading it.

    Args:
        launches: Recorded launches.
        progress: Callback for the number of compiled kernels and the total.
        threads: Number of threads; by default one for each core that this process may use.
        ignore_errors: Return None for kernels that fail to compile, instead of raising.

    Returns:
        Triton's compiled kernel of each launch.
    """
    # Triton sets a context variable while it compiles in threads, and some versions leave it set after an error
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
                pool.count()  # already compiled
    return [attempt(kernel.result) if hasattr(kernel, "result") else kernel for kernel in kernels]


class _Counting(ThreadPoolExecutor):
    """Thread pool that reports each compiled kernel to ``progress``."""

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
