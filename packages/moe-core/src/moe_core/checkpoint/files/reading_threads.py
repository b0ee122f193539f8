"""Read a layer's experts in several threads.

One thread copies bytes more slowly than a disk or the page cache delivers them.

Layers of a model are read ahead, because converting a layer leaves the disk idle. They share one pool of reader
threads, so that all readers work on one layer while another is checked or converted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

#: Number of reader threads for a single layer.
READERS = 4
#: Number of reader threads shared by all layers that are read ahead.
READERS_AHEAD = 8
#: Minimum bytes for reading in threads; below, starting the threads takes longer than reading.
FEWEST_BYTES = 32 << 20
#: Number of layers read ahead: one whose last tensors are being checked, one that all threads read, and one that they
#: continue with while the first is converted.
AHEAD = 3

#: ``pool`` is the reader pool of the layer that the current thread loads.
_OWN = threading.local()


@contextlib.contextmanager
def readers() -> Iterator[None]:
    """Share one reader pool among this thread's :func:`in_threads` calls within the context."""
    if getattr(_OWN, "pool", None) is not None:
        yield
        return
    pool = _OWN.pool = _threads(READERS, "moe_core_reader")
    try:
        yield
    finally:
        _OWN.pool = None
        pool.shutdown(cancel_futures=True)


def in_threads(job: Callable[[int], T], count: int, nbytes: int) -> Generator[T, None, None]:
    """Run ``job(0)`` to ``job(count - 1)`` in reader threads and yield the results in order.

    On the first error, jobs that have not started are canceled and running ones are waited for.

    Args:
        job: Reads one part, given its number.
        count: Number of jobs.
        nbytes: Total bytes that the jobs read; small reads run in the calling thread.

    Yields:
        The result of each job.
    """
    if nbytes < FEWEST_BYTES or count < 2:
        yield from map(job, range(count))
        return
    run = _in_modes(job)
    with readers():
        waiting = deque(_OWN.pool.submit(run, number) for number in range(count))
        try:
            while waiting:
                waiting[0].exception()  # the job stays in the queue until done, so that an interrupt waits for it
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], use: Callable[[S, T], U], nbytes: Callable[[S], int]
) -> Generator[U, None, None]:
    """Yield ``use(item, read(item))`` for each item in order, reading the next items in threads.

    ``use`` runs in the calling thread. A further item is read once a use has ended, so that at most :data:`AHEAD`
    results of ``read`` exist at a time. The first error ends the iteration; running reads are waited for and their
    results dropped.

    Args:
        items: Items to process.
        read: Reads an item.
        use: Processes an item and what was read.
        nbytes: Returns the bytes of an item; small items are read in the calling thread when they are used.

    Yields:
        The result of ``use`` for each item.
    """
    run, shared = _in_modes(read), _threads(READERS_AHEAD, "moe_core_reader")
    pool = _threads(AHEAD, "moe_core_ahead", lambda: setattr(_OWN, "pool", shared))
    waiting: deque[tuple[S, Future[T] | None]] = deque()
    rest = iter(items)
    try:
        while True:
            for item in rest:
                waiting.append((item, pool.submit(run, item) if nbytes(item) >= FEWEST_BYTES else None))
                if len(waiting) >= AHEAD:
                    break
            if not waiting:
                return
            item, future = waiting.popleft()
            if future is None:
                yield use(item, read(item))
            else:
                results = [future.result()]
                del future  # it also keeps the result alive
                yield use(item, results.pop())
    finally:
        waiting.clear()
        pool.shutdown(cancel_futures=True)
        shared.shutdown(cancel_futures=True)


def _threads(count: int, name: str, begin: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Create a thread pool that uses the caller's CUDA stream.

    Each new thread calls ``begin``. A thread is started only when there is work for it.
    """
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # The device is passed by index: torch finds no device if GPUs were hidden after the process initialized CUDA.
    stream = torch.cuda.current_stream(torch.cuda.current_device()) if initialized else None

    def initialize() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        if begin is not None:
            begin()

    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initialize)


def _in_modes(job: Callable[[S], T]) -> Callable[[S], T]:
    """Wrap ``job`` with the caller's inference mode, since torch modes are thread-local."""
    inference = torch.is_inference_mode_enabled()

    def run(given: S) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return job(given)

    return run
