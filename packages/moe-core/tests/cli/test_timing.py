"""How moe bench times calls."""

from __future__ import annotations

import time

import pytest
import torch
from moe_core.cli import _timing


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that calls advance."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_no_figure_is_that_of_a_first_call(clock: list[float]) -> None:
    """Calls that get faster for a while: only those are measured that are as fast as they get."""
    speeds = iter([1.0, 0.5, 0.2, 0.1, 0.05])

    def call() -> None:
        clock[0] += next(speeds, 0.01)

    timing = _timing.measure([call], torch.device("cpu"), graph=False, budget=10.0)
    assert (timing.median, timing.low, timing.high) == pytest.approx((0.01, 0.01, 0.01))
    assert timing.calls == _timing.MOST


def test_warming_up_ends_with_the_budget(clock: list[float]) -> None:
    seconds = [2.0**20]

    def call() -> None:
        seconds[0] /= 2
        clock[0] += seconds[0]

    timing = _timing.measure([call], torch.device("cpu"), graph=False, budget=1.0)
    assert timing.calls == _timing.FEWEST


def test_slow_calls_are_repeated_too(clock: list[float]) -> None:
    def call() -> None:
        clock[0] += 3.0

    assert _timing.measure([call], torch.device("cpu"), graph=False, budget=1.0).calls == _timing.FEWEST >= 10
