"""Timing of calls that run for microseconds to seconds, on the host or a GPU: many calls, rotating inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: seconds that one measurement may take, and the number of calls that it consists of
BUDGET, FEWEST, MOST = 1.0, 10, 200
#: a round of calls this much faster than all before it says that the next may be faster still
FASTER = 0.95


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    calls: int
    graph: bool


def measure(
    calls: Sequence[Callable[[], object]], device: torch.device, *, graph: bool, budget: float = BUDGET
) -> Timing:
    """Time ``calls`` in turn: the same work on different inputs, so that none finds its own in a cache.

    On a GPU each call is a CUDA graph where ``graph``, timed by events; elsewhere by the host's clock.  Before,
    they are called until they get no faster, so that no figure is that of a first call: caches, clocks, threads.
    """
    for call in calls:
        call()
    if device.type == "cuda":
        return _measure_cuda(calls, graph, budget)

    def timed(launches: Sequence[Callable[[], object]]) -> list[float]:
        return [_host_seconds(launch) for launch in launches]

    return _summary(_settled(calls, timed, budget), graph=False)


def _settled(
    launches: Sequence[Callable[[], object]],
    timed: Callable[[Sequence[Callable[[], object]]], list[float]],
    budget: float,
) -> list[float]:
    """Seconds of each of many calls, after rounds of calls until one is no faster, or the budget is spent."""
    best, end = statistics.median(timed(launches)), time.perf_counter() + budget
    while True:
        now = statistics.median(timed(launches))
        if now > FASTER * best or time.perf_counter() > end:
            break
        best = now
    return timed([launches[i % len(launches)] for i in range(_count(min(now, best), budget))])


def _count(seconds: float, budget: float) -> int:
    return max(FEWEST, min(MOST, int(budget / max(seconds, 1e-7))))


def _host_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure_cuda(calls: Sequence[Callable[[], object]], graph: bool, budget: float) -> Timing:
    torch.cuda.synchronize()
    launches: Sequence[Callable[[], object]] = [_captured(call) for call in calls] if graph else calls
    return _summary(_settled(launches, _event_seconds, budget), graph)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _event_seconds(launches: Sequence[Callable[[], object]]) -> list[float]:
    pairs = []
    for launch in launches:
        begin, end = _event(), _event()
        begin.record()
        launch()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e-3 for begin, end in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _summary(times: list[float], graph: bool) -> Timing:
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, low, high, len(times), graph)
