"""Timing of calls that run for microseconds to seconds, on the host or a GPU: many calls, rotating inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: seconds that one measurement may take, and the number of calls that it consists of
BUDGET, FEWEST, MOST = 1.0, 10, 200
#: calls of a CUDA graph at least where they are short: one by itself is timed with the gap that its launch leaves
IN_GRAPH, SHORT = 8, 1e-3
#: a round of calls this much faster than all before it says that the next may be faster still
FASTER = 0.95


@dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float
    calls: int
    graph: bool


def _alone(seconds: float) -> float:
    return seconds


def measure(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    graph: bool,
    budget: float = BUDGET,
    slowest: Callable[[float], float] = _alone,
) -> Timing:
    """Time ``calls`` in turn: the same work on different inputs, so that none finds its own in a cache.

    On a GPU all of them are one CUDA graph where ``graph``, short ones again and again up to `IN_GRAPH`, and events
    time its replays; without a graph they time each call; elsewhere the host's clock does.  Before, calls are made
    until they get no faster, so that no figure is that of a first call: caches, clocks, threads.

    Ranks whose calls wait for each other give ``slowest``, the most that any of them has: all make as many calls.
    """
    for call in calls:
        call()
    if device.type == "cuda":
        return _measure_cuda(calls, graph, budget, slowest)

    def timed(launches: Sequence[Callable[[], object]]) -> list[float]:
        return [_host_seconds(launch) for launch in launches]

    return _summary(_warm_times(calls, timed, budget, slowest), graph=False)


def _warm_times(
    launches: Sequence[Callable[[], object]],
    timed: Callable[[Sequence[Callable[[], object]]], list[float]],
    budget: float,
    slowest: Callable[[float], float],
) -> list[float]:
    """Seconds of each of many calls, after rounds of calls until one is no faster, or the budget is spent."""
    best, end = slowest(statistics.median(timed(launches))), time.perf_counter() + budget
    while True:
        now = slowest(statistics.median(timed(launches)))
        spent = slowest(float(time.perf_counter() > end))
        if now > FASTER * best or spent:
            break
        best = now
    return timed([launches[i % len(launches)] for i in range(_count(min(now, best), budget))])


def _count(seconds: float, budget: float) -> int:
    return max(FEWEST, min(MOST, int(budget / max(seconds, 1e-7))))


def _host_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure_cuda(
    calls: Sequence[Callable[[], object]], graph: bool, budget: float, slowest: Callable[[float], float]
) -> Timing:
    torch.cuda.synchronize()
    if not graph:
        return _summary(_warm_times(calls, _event_seconds, budget, slowest), graph)
    short = slowest(statistics.median(_event_seconds(calls))) < SHORT
    held = [*calls] * (-(-IN_GRAPH // len(calls)) if short else 1)
    times = _warm_times([_captured(held)], _event_seconds, budget, slowest)
    return _summary([seconds / len(held) for seconds in times], graph)


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """All ``calls`` as one launch."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
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
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), tenths[0], tenths[-1], len(times), graph)
