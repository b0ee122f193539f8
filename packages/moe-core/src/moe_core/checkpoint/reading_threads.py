"""Several threads read a layer's experts: one alone copies bytes slower than a disk or the page cache gives them.

Layers of a model are read ahead: converting one takes no disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")

#: threads of one load
READERS = 4
#: bytes below which starting threads takes longer than reading
FEWEST_BYTES = 32 << 20
#: layers that are read at a time
AHEAD = 2


def in_threads(job: Callable[[int], T], count: int, nbytes: int) -> Iterator[T]:
    """``job(0)`` to ``job(count - 1)``, in this order, which together read ``nbytes``.

    The first error ends it; jobs that have not begun are dropped.
    """
    if nbytes < FEWEST_BYTES or count < 2:
        yield from map(job, range(count))
        return
    pool, run = _threads(READERS, "moe_core_reader", job)
    try:
        yield from pool.map(run, range(count))
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(
    items: Iterable[S], read: Callable[[S], T], use: Callable[[S, T], U], nbytes: Callable[[S], int]
) -> Generator[U, None, None]:
    """``use(item, read(item))`` for each of ``items``, in order.

    While one is used, which is done here, the next is read in a thread, and the one after it from when the use has
    ended: two of what ``read`` returns exist at a time.  What has few ``nbytes`` is read when it is used.  The first
    error ends it; what is being read is waited for, and dropped.
    """
    pool, run = _threads(AHEAD, "moe_core_ahead", read)
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


def _threads(count: int, name: str, job: Callable[[S], T]) -> tuple[ThreadPoolExecutor, Callable[[S], T]]:
    """A pool, and ``job`` as its threads do it: in the caller's modes of torch, which belong to threads."""
    inference = torch.is_inference_mode_enabled()
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if initialised else None

    def begin() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    def run(given: S) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return job(given)

    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=begin), run
