"""CUDA graph timing, shared by the benchmark scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def heat_up() -> None:
    """Run the GPU until its clocks are those of a busy GPU."""
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(400):
        a @ a
    torch.cuda.synchronize()


def captured(calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Capture a graph of all calls on the current stream; returns it and the calls' results.

    Each call must have run once before.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        outputs = [call() for call in calls]
    return graph, outputs


def replay_times(graph: torch.cuda.CUDAGraph, calls: int, replays: int) -> list[float]:
    """Return the microseconds per call of each replay, without the first ones."""
    times = []
    for _ in range(replays + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return times[5:]
