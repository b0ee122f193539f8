"""Find the best launch configurations of one layer within a time budget.

For each number of tokens the search starts from the built-in plan, times its neighbors (`candidates`), and continues
from whatever is faster. The numbers of tokens take turns, so that a short budget is spread over all of them. The plans
of a round are compiled beforehand, in parallel. In the end the built-in plan and the best one are timed again,
alternately. The best plan is kept only if its advantage exceeds measurement noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moe_core.kernels.gemm.heuristics import LayerProblem
from moe_core.kernels.gemm.heuristics.tuned import TunedRange
from moe_core.kernels.tuning.candidates import neighbors
from moe_core.kernels.tuning.limits import Plan, refusals

#: fraction of the time a plan must save to replace the built-in one
AHEAD = 0.02
#: number of final measurements of each of the two plans
TURNS = 3
#: fraction of the time budget reserved for the final measurements
KEPT = 0.15
#: callback that receives a status text and the elapsed fraction of the time budget
Progress = Callable[[str, float], None]


class Rig(Protocol):
    """Measurement interface: a layer on a GPU, or a test double."""

    def default(self, tokens: int) -> Plan:
        """Return the built-in plan.

        Args:
            tokens: Number of tokens per call.

        Returns:
            The plan.
        """

    def prepare(self, trials: Sequence[tuple[int, Plan]]) -> list[bool]:
        """Compile the kernels for calls with given numbers of tokens and plans.

        Args:
            trials: Numbers of tokens and plans.

        Returns:
            Whether each trial can run.
        """

    def seconds(self, tokens: int, plan: Plan) -> float:
        """Measure the typical time of a call.

        Args:
            tokens: Number of tokens per call.
            plan: The plan.

        Returns:
            Seconds; infinity if the call fails.
        """


@dataclass
class _Point:
    """A measured number of tokens, with the range it represents.

    Holds the best plan so far, and the plans still to try.
    """

    first: int
    last: int
    default: Plan
    best: Plan
    default_seconds: float = 0.0
    best_seconds: float = 0.0
    queue: list[Plan] = field(default_factory=list)
    seen: set[Plan] = field(default_factory=set)

    def look_around(self, problem: LayerProblem) -> None:
        """Put the neighbors of the best plan in front of the queue."""
        fresh = dict.fromkeys(neighbors(problem, self.best, self.first, self.last))
        self.queue = [plan for plan in dict.fromkeys((*fresh, *self.queue)) if plan not in self.seen]

    def hear_of(self, plan: Plan, problem: LayerProblem) -> None:
        """Put the best plan of an adjacent number of tokens in front of the queue."""
        if plan not in self.seen and not refusals(problem, plan, self.first, self.last):
            self.queue = [plan, *(other for other in self.queue if other != plan)]


def search(
    problem: LayerProblem,
    tokens: Sequence[int],
    rig: Rig,
    *,
    seconds: float,
    clock: Callable[[], float],
    at_once: int = 8,
    progress: Progress | None = None,
) -> tuple[TunedRange, ...]:
    """Find the best plan for each number of tokens within a time budget.

    A range extends from one number of tokens, exclusive, to the next; the first range contains only its own number.

    Args:
        problem: The layer.
        tokens: Numbers of tokens to measure.
        rig: Measures plans.
        seconds: Time budget.
        clock: Returns the time in seconds.
        at_once: Number of plans to compile before any of them is timed.
        progress: Callback for the status text and the elapsed fraction of the budget.

    Returns:
        The best plan of each range; the built-in one if none is faster.
    """
    start = clock()
    counts = sorted(set(tokens))
    points = []
    for before, last in zip((counts[0] - 1, *counts), counts, strict=False):
        default = rig.default(last)
        points.append(_Point(before + 1, last, default, default))

    def tell(text: str) -> None:
        if progress is not None:
            progress(text, (clock() - start) / seconds)

    tell(f"{len(points)} built-in plans")
    fits = rig.prepare([(point.last, point.default) for point in points])
    for point, fit in zip(points, fits, strict=True):
        point.default_seconds = point.best_seconds = rig.seconds(point.last, point.default) if fit else float("inf")
        point.seen.add(point.default)
        point.look_around(problem)
    end, tried = start + seconds * (1 - KEPT), 0
    while clock() < end:
        batch = _batch(points, at_once)
        if not batch:
            break
        tell(f"{tried} plans tried, {_ahead(points)} of {len(points)} built-in ones beaten")
        fits = rig.prepare([(point.last, plan) for point, plan in batch])
        better = set()
        for (point, plan), fit in zip(batch, fits, strict=True):
            # every range gets its turn in the first round, even beyond the budget
            if clock() >= end and tried > len(points):
                break
            tried += 1
            took = rig.seconds(point.last, plan) if fit else float("inf")
            if took < point.best_seconds:
                point.best, point.best_seconds = plan, took
                better.add(id(point))
        for number, point in enumerate(points):
            if id(point) in better:
                point.look_around(problem)
                for near in (*points[max(number - 1, 0) : number], *points[number + 1 : number + 2]):
                    near.hear_of(point.best, problem)
    tell(f"{tried} plans tried, {_ahead(points)} of {len(points)} built-in ones beaten; timing these again")
    return tuple(_timed_again(point, rig) for point in points)


def _batch(points: Sequence[_Point], at_once: int) -> list[tuple[_Point, Plan]]:
    """Return the next plans: one per point in turn."""
    found: list[tuple[_Point, Plan]] = []
    while len(found) < at_once and any(point.queue for point in points):
        for point in points:
            if point.queue:
                plan = point.queue.pop(0)
                point.seen.add(plan)
                found.append((point, plan))
    return found


def _ahead(points: Sequence[_Point]) -> int:
    return sum(point.best_seconds < (1 - AHEAD) * point.default_seconds for point in points)


def _timed_again(point: _Point, rig: Rig) -> TunedRange:
    """Time the default and the best plan alternately, and return the range with the better one."""
    plan = point.best
    if plan != point.default and point.best_seconds < (1 - AHEAD) * point.default_seconds:
        times = [(rig.seconds(point.last, point.default), rig.seconds(point.last, plan)) for _ in range(TURNS)]
        default, best = (statistics.median(column) for column in zip(*times, strict=True))
        if best < (1 - AHEAD) * default:
            return _range(point, plan, default, best)
        return _range(point, point.default, default, default)
    return _range(point, point.default, point.default_seconds, point.default_seconds)


def _range(point: _Point, plan: Plan, default: float, best: float) -> TunedRange:
    shown = [round(1e6 * seconds, 3) if seconds < float("inf") else 0.0 for seconds in (default, best)]
    return TunedRange(point.first, point.last, plan, *shown)
