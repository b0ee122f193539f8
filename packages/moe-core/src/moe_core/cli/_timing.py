"""Timing of calls from microseconds to seconds on a host or GPU: rotating inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: seconds of one measurement, and the smallest and largest number of its calls
BUDGET, FEWEST, MOST = 1.0, 10, 200
#: minimum number of calls in a CUDA graph if each is shorter than SHORT seconds; a single call would be timed with its
#: launch gap
IN_GRAPH, SHORT = 8, 1e-3
#: if a round of calls is faster than the best one so far by this factor, the next may be faster still
FASTER = 0.95


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 10th and 90th percentile."""

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
    """Time ``calls`` in turn: the same work on different inputs, to defeat caches.

    On a GPU with ``graph``, all calls form one CUDA graph, and events time its replays. Short calls are repeated in it,
    at least `IN_GRAPH` in total. Without a graph, events time each call. Elsewhere the host's clock is used. Warm-up
    calls run until they get no faster, so no figure includes cold caches, clocks or threads.

    Args:
        calls: The calls.
        device: Device that they run on.
        graph: Whether to capture a CUDA graph.
        budget: Seconds that the measurement may take.
        slowest: For ranks whose calls wait for each other: returns the largest value of any rank, so that all make the
            same number of calls and get the same timing.

    Returns:
        The timing.
    """
    for call in calls:
        call()
    if device.type == "cuda":
        return _measure_cuda(calls, graph, budget, slowest)

    def timed(launches: Sequence[Callable[[], object]]) -> list[float]:
        return [_host_seconds(launch) for launch in launches]

    return _summary(_warm_times(calls, timed, budget, slowest), slowest, graph=False)


def _warm_times(
    launches: Sequence[Callable[[], object]],
    timed: Callable[[Sequence[Callable[[], object]]], list[float]],
    budget: float,
    slowest: Callable[[float], float],
) -> list[float]:
    """Return the seconds of each call, after warm-up until a round is no faster or time is up."""
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
        return _summary(_warm_times(calls, _event_seconds, budget, slowest), slowest, graph=False)
    short = slowest(statistics.median(_event_seconds(calls))) < SHORT
    held = [*calls] * (-(-IN_GRAPH // len(calls)) if short else 1)
    times = _warm_times([_captured(held)], _event_seconds, budget, slowest)
    return _summary([seconds / len(held) for seconds in times], slowest, graph=True)


def _captured(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Capture all ``calls`` as one launch."""
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


def _summary(times: list[float], slowest: Callable[[float], float], *, graph: bool) -> Timing:
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    median, low, high = map(slowest, (statistics.median(times), tenths[0], tenths[-1]))
    return Timing(median, low, high, len(times), graph)
