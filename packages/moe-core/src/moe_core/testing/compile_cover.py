"""Which of many kernel launches to compile, where compiling all of them takes too long.

Each launch is described by the values of its kernel's arguments: types, constants, the functions that it is put
together from, what divides the integers, the compiler's options.  What keeps a kernel from compiling or fitting is
mostly one of these values or two that meet.  So few launches are taken in which they occur, as a covering array does:
every kernel for every target, and, for one of the targets, with ``strength`` 1 every value that an argument of a kernel
takes, with 2 every pair of values of two arguments.  Which target that is, is left to chance of a fixed seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from moe_core.kernels.launch.describe import Value


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: for which target, by which specimen, the how-manieth of it, and with what values."""

    target: str
    specimen: int
    number: int
    kernel: str
    values: frozenset[Value]


def choose(launches: Sequence[Launch], strength: int) -> list[Launch]:
    """Few of ``launches`` that cover all of them in the given strength, 1 or 2; see the module.

    Greedy and deterministic: the launch that adds most comes next.
    """
    needs = _needs(launches, strength)
    open_needs = set().union(*needs) if needs else set()
    # of equals, none is always for the target that comes first
    order = random.Random(0).sample(range(len(launches)), len(launches))
    gains = [(-len(need), rank, i) for rank, i, need in zip(order, range(len(needs)), needs, strict=True)]
    heapq.heapify(gains)
    chosen: list[int] = []
    while open_needs:
        _, rank, i = heapq.heappop(gains)
        gain = (-len(needs[i] & open_needs), rank, i)
        # gains only shrink: one that still leads after it was counted anew is the largest
        if gains and gain > gains[0]:
            heapq.heappush(gains, gain)
            continue
        chosen.append(i)
        open_needs -= needs[i]
    return [launches[i] for i in sorted(_needed(chosen, needs))]


def _needs(launches: Sequence[Launch], strength: int) -> list[set[Hashable]]:
    """What each launch covers; values that all launches of a kernel share say nothing beside its name."""
    shared: dict[str, frozenset[Value]] = {}
    for launch in launches:
        shared[launch.kernel] = shared.get(launch.kernel, launch.values) & launch.values
    # numbers in place of values: pairs of them are compared millions of times
    numbers: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    needs: list[set[Hashable]] = []
    for launch in launches:
        varying = sorted(numbers[launch.kernel, value] for value in launch.values - shared[launch.kernel])
        some = (itertools.combinations(varying, size) for size in range(1, strength + 1))
        needs.append({(launch.target, launch.kernel), *itertools.chain.from_iterable(some)})
    return needs


def _needed(chosen: Sequence[int], needs: Sequence[set[Hashable]]) -> list[int]:
    """``chosen`` without those that the later ones made superfluous."""
    times = Counter(need for i in chosen for need in needs[i])
    kept = []
    for i in reversed(chosen):
        if all(times[need] > 1 for need in needs[i]):
            times.subtract(needs[i])
        else:
            kept.append(i)
    return kept
