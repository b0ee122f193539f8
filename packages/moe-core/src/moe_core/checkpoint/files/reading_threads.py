"""Several threads read a layer's experts: one alone copies bytes slower than a disk or the page cache gives them.

Layers of a model are read ahead: converting one takes no disk.  They share their readers, so that all of these work for
one layer while another is looked at or converted.
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

#: threads of one layer that is read by itself
READERS = 4
#: threads of all layers that are read ahead
READERS_AHEAD = 8
#: bytes below which starting threads takes longer than reading
FEWEST_BYTES = 32 << 20
#: layers that are read at a time: one whose tensors are all there but for the last ones, which are looked at; one that
#: all threads read; and one that they go on with, while what waits for the first is converted
AHEAD = 3

#: ``pool``: the readers of the layer that a thread loads
_OWN = threading.local()


@contextlib.contextmanager
def readers() -> Iterator[None]:
    """Within it, what this thread reads by :func:`in_threads` is read by the same threads; they end with it."""
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
    """``job(0)`` to ``job(count - 1)``, in this order, which together read ``nbytes``.

    The first error ends it; jobs that have not begun are dropped, and those that have are waited for.
    """
    if nbytes < FEWEST_BYTES or count < 2:
        yield from map(job, range(count))
        return
    run = _in_modes(job)
    with readers():
        waiting = deque(_OWN.pool.submit(run, number) for number in range(count))
        try:
            while waiting:
                waiting[0].exception()  # interrupted here, it is still among those that are waited for
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            wait(waiting)


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], use: Callable[[S, T], U], nbytes: Callable[[S], int]
) -> Generator[U, None, None]:
    """``use(item, read(item))`` for each of ``items``, in order.

    While one is used, which is done here, the next ones are read in threads, and another one from when the use has
    ended: :data:`AHEAD` of what ``read`` returns exist at a time.  What has few ``nbytes`` is read when it is used.
    The first error ends it; what is being read is waited for, and dropped.
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
                del future  # it holds the result too
                yield use(item, results.pop())
    finally:
        waiting.clear()
        pool.shutdown(cancel_futures=True)
        shared.shutdown(cancel_futures=True)


def _threads(count: int, name: str, begin: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """Threads that ``begin`` so, and that work on the caller's stream; none is started before it has work."""
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # the device by its number: torch looks for none where GPUs are hidden from a process that has begun to use them
    stream = torch.cuda.current_stream(torch.cuda.current_device()) if initialised else None

    def initialise() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        if begin is not None:
            begin()

    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=initialise)


def _in_modes(job: Callable[[S], T]) -> Callable[[S], T]:
    """``job`` as other threads do it: in the caller's modes of torch, which belong to threads."""
    inference = torch.is_inference_mode_enabled()

    def run(given: S) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return job(given)

    return run
