"""Several threads read a layer's experts: one alone copies bytes slower than a disk or the page cache gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

#: threads of one load
READERS = 4
#: bytes below which starting threads takes longer than reading
FEWEST_BYTES = 32 << 20


def in_threads(job: Callable[[int], T], count: int, nbytes: int) -> Iterator[T]:
    """``job(0)`` to ``job(count - 1)``, in this order, which together read ``nbytes``.

    The first error ends it; jobs that have not begun are dropped.
    """
    if nbytes < FEWEST_BYTES or count < 2:
        yield from map(job, range(count))
        return
    # torch's modes, its current GPU and stream belong to threads
    inference = torch.is_inference_mode_enabled()
    initialised: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream() if initialised else None

    def begin() -> None:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

    def run(index: int) -> T:
        with torch.inference_mode(inference), torch.no_grad():
            return job(index)

    pool = ThreadPoolExecutor(READERS, thread_name_prefix="moe_core_reader", initializer=begin)
    try:
        yield from pool.map(run, range(count))
    finally:
        pool.shutdown(cancel_futures=True)
