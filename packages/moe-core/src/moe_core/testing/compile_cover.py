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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: (parameter, position inside a tuple, …, value)
Value = tuple[Hashable, ...]


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: for which target, by which specimen, the how-manieth of it, and with what values."""

    target: str
    specimen: int
    number: int
    kernel: str
    values: frozenset[Value]


def describe(kernel: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> frozenset[Value]:
    """What a Triton kernel is compiled for when it is called so."""
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | dict(keywords)
    values: set[Value] = set()
    for parameter in kernel.params:
        value = given.pop(parameter.name, parameter.default)
        values |= _parts((parameter.name,), value, constant=parameter.is_constexpr)
    return frozenset(values.union(*(_parts((name,), value, constant=True) for name, value in given.items())))


def _parts(name: Value, value: Any, *, constant: bool) -> set[Value]:
    if type(value).__name__ == "constexpr":  # a constant in a tuple, which Triton wraps
        value, constant = value.value, True
    if not constant and isinstance(value, tuple):
        return {part for i, item in enumerate(value) for part in _parts((*name, i), item, constant=False)}
    return {(*name, _text(value, constant=constant))}


def _text(value: Any, *, constant: bool) -> str:
    """The value as far as Triton specialises a kernel for it; constants wholly."""
    # functions and constants may lie in tuples too
    constant = constant or hasattr(value, "__name__") or type(value).__name__ == "constexpr"
    if constant or value is None or isinstance(value, bool):
        return str(getattr(value, "__name__", None) or repr(value))
    if isinstance(value, int):
        return "1" if value == 1 else "multiple of 16" if value % 16 == 0 else "integer"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"{value.base.dtype} {list(value.block_shape)}"
    return str(getattr(value, "dtype", type(value).__name__))


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
