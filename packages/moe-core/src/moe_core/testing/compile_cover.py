"""Choose kernel launches to compile if compiling all of them takes too long.

Each launch is described by the values of its kernel's arguments: types, constants, the functions it is composed of,
divisibility of integers, and compiler options. A kernel mostly fails to compile or fit because of one of these values,
or of two together. So a small set of launches is chosen that contains them, as in a covering array. It contains every
kernel for every target. With ``strength`` 1 it also contains every value of a kernel's arguments for one of the
targets, with 2 every pair of values of two arguments. The target is chosen at random with a fixed seed.
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
    """One launch of a kernel.

    Attributes:
        target: Architecture that it is compiled for.
        specimen: Number of the specimen.
        number: Number of the launch within the specimen.
        kernel: Name of the kernel.
        values: Values that it is compiled for.
    """

    target: str
    specimen: int
    number: int
    kernel: str
    values: frozenset[Value]


def choose(launches: Sequence[Launch], strength: int) -> list[Launch]:
    """Choose few launches that cover all of them with the given strength; see the module.

    The choice is greedy and deterministic: the launch that adds most comes next.

    Args:
        launches: All launches.
        strength: 1 for every value, 2 for every pair of values.

    Returns:
        The chosen launches, in their original order.
    """
    needs = _needs(launches, strength)
    open_needs = set().union(*needs) if needs else set()
    # A random order keeps ties from always favoring the first target.
    order = random.Random(0).sample(range(len(launches)), len(launches))
    gains = [(-len(need), rank, i) for rank, i, need in zip(order, range(len(needs)), needs, strict=True)]
    heapq.heapify(gains)
    chosen: list[int] = []
    while open_needs:
        _, rank, i = heapq.heappop(gains)
        gain = (-len(needs[i] & open_needs), rank, i)
        # Gains only shrink: a launch that still leads after a recount has the largest gain.
        if gains and gain > gains[0]:
            heapq.heappush(gains, gain)
            continue
        chosen.append(i)
        open_needs -= needs[i]
    return [launches[i] for i in sorted(_needed(chosen, needs))]


def _needs(launches: Sequence[Launch], strength: int) -> list[set[Hashable]]:
    """Return what each launch covers.

    Values shared by all launches of a kernel are omitted: they add nothing to its name.
    """
    shared: dict[str, frozenset[Value]] = {}
    for launch in launches:
        shared[launch.kernel] = shared.get(launch.kernel, launch.values) & launch.values
    # Numbers replace values, because pairs of them are compared millions of times.
    numbers: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    needs: list[set[Hashable]] = []
    for launch in launches:
        varying = sorted(numbers[launch.kernel, value] for value in launch.values - shared[launch.kernel])
        some = (itertools.combinations(varying, size) for size in range(1, strength + 1))
        needs.append({(launch.target, launch.kernel), *itertools.chain.from_iterable(some)})
    return needs


def _needed(chosen: Sequence[int], needs: Sequence[set[Hashable]]) -> list[int]:
    """Return ``chosen`` without launches that later ones made redundant."""
    times = Counter(need for i in chosen for need in needs[i])
    kept = []
    for i in reversed(chosen):
        if all(times[need] > 1 for need in needs[i]):
            times.subtract(needs[i])
        else:
            kept.append(i)
    return kept
