"""Timing of calls that run for microseconds to seconds, on the host or a GPU: many calls, rotating inputs, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: seconds that one measurement may take, and the number of calls that it consists of
BUDGET, FEWEST, MOST = 1.0, 5, 200


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

    On a GPU each call is a CUDA graph where ``graph``, timed by events; elsewhere by the host's clock.
    """
    for call in calls:
        call()
    if device.type == "cuda":
        return _measure_cuda(calls, graph, budget)
    first = _host_seconds(calls[0])
    times = [_host_seconds(calls[i % len(calls)]) for i in range(_count(first, budget))]
    return _summary(times, graph=False)


def _count(seconds: float, budget: float) -> int:
    return max(FEWEST, min(MOST, int(budget / max(seconds, 1e-7))))


def _host_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _measure_cuda(calls: Sequence[Callable[[], object]], graph: bool, budget: float) -> Timing:
    torch.cuda.synchronize()
    launches: Sequence[Callable[[], object]] = [_captured(call) for call in calls] if graph else calls
    first = _event_seconds([launches[0]] * 3)
    times = _event_seconds([launches[i % len(launches)] for i in range(_count(statistics.median(first), budget))])
    return _summary(times, graph)


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
