"""Find the best launch configurations of one layer within a time.

For each number of tokens the search starts from the built-in plan, times its neighbours (`candidates`), and goes on
from whatever is better.  Numbers of tokens take turns, so that little time is spread over all.  What a round times is
compiled before, in parallel.  In the end the built-in plan and the best one are timed again, in turn, and the best is
only kept where it is ahead by more than such times scatter.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from moe_core.kernels.gemm.heuristics import LayerProblem
from moe_core.kernels.gemm.heuristics.tuned import TunedRange
from moe_core.kernels.tuning.candidates import neighbours
from moe_core.kernels.tuning.limits import Plan, refusals

#: what a plan must save to be kept instead of the built-in one
AHEAD = 0.02
#: times that each of the two is measured in the end
TURNS = 3
#: part of the time that is kept for that
KEPT = 0.15
#: told what is going on, and the part of the time that is over
Progress = Callable[[str, float], None]


class Rig(Protocol):
    """What measures: a layer on a GPU, or a stand-in."""

    def default(self, tokens: int) -> Plan:
        """The built-in plan."""

    def prepare(self, trials: Sequence[tuple[int, Plan]]) -> list[bool]:
        """Compile what calls with so many tokens, by a plan, need; which of them can run."""

    def seconds(self, tokens: int, plan: Plan) -> float:
        """The time of a call, typical of many; infinite where it fails."""


@dataclass
class _Point:
    """A number of tokens: the range that it stands for, the best plan so far, and what is still to be tried."""

    first: int
    last: int
    default: Plan
    best: Plan
    default_seconds: float = 0.0
    best_seconds: float = 0.0
    queue: list[Plan] = field(default_factory=list)
    seen: set[Plan] = field(default_factory=set)

    def look_around(self, problem: LayerProblem) -> None:
        """Put the best plan's neighbours before what is left."""
        fresh = dict.fromkeys(neighbours(problem, self.best, self.first, self.last))
        self.queue = [plan for plan in dict.fromkeys((*fresh, *self.queue)) if plan not in self.seen]

    def hear_of(self, plan: Plan, problem: LayerProblem) -> None:
        """Try first what is best for a neighbouring number of tokens."""
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
    """The best plan that was found for each of ``tokens``, in ``seconds`` by ``clock``; at least the built-in ones.

    ``at_once``: plans that are compiled before any is timed.  A range reaches from one number of tokens, excluded, to
    the next; the first begins with its own.
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
            # every range has its turn of the first round
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
    """The next plans: one of each point in turn, points with the same plans together."""
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
    """The range, with times that were taken side by side."""
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
