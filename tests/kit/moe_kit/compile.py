"""Compile the kernels of all packages, or few launches that cover the values of their arguments.

    python -m moe_kit.compile sm80 sm90 gfx950 --cover 2

Each launch is described by the values of its kernel's arguments: types, constants, the functions it is composed of,
divisibility of integers, and compiler options. A kernel mostly fails to compile or fit because of one of these values,
or of two together. So a small set of launches is chosen that contains them, as in a covering array. It contains every
kernel for every target. With ``--cover 1`` it also contains every value of a kernel's arguments for one of the targets,
with 2 every pair of values of two arguments. The target is chosen at random with a fixed seed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from functools import partial

from moe_core.kernels.launch.describe import Value
from moe_core.spec.device import DeviceInfo
from moe_core.testing.compile import check_targets, plugin_packages
from moe_core.testing.launches import Compilation, Example
from moe_core.testing.meta_layers import backend_examples

from moe_kit.hazards import hazards
from moe_kit.op_examples import op_examples


def choose(launches: Sequence[Compilation], strength: int) -> list[Compilation]:
    """Choose few launches that cover all of them with the given strength; see the module.

    The choice is greedy and deterministic: the launch that adds most comes next.

    Args:
        launches: All launches.
        strength: 1 for every value, 2 for every pair of values; 0 for all launches.

    Returns:
        The chosen launches, in their original order.
    """
    if not strength:
        return list(launches)
    needs = _needs(launches, strength)
    open_needs = set().union(*needs)
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


def _needs(launches: Sequence[Compilation], strength: int) -> list[set[Hashable]]:
    """Return what each launch covers.

    Values shared by all launches of a kernel are omitted: they add nothing to its name.
    """
    shared: dict[str, frozenset[Value]] = {}
    for one in launches:
        shared[one.name] = shared.get(one.name, one.values) & one.values
    # Numbers replace values, because pairs of them are compared millions of times.
    numbers: defaultdict[Hashable, int] = defaultdict(itertools.count().__next__)
    needs: list[set[Hashable]] = []
    for one in launches:
        varying = sorted(numbers[one.name, value] for value in one.values - shared[one.name])
        some = (itertools.combinations(varying, size) for size in range(1, strength + 1))
        needs.append({(one.arch, one.name), *itertools.chain.from_iterable(some)})
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


def main() -> int:
    """Run the command line.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m moe_kit.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="+", metavar="target", help="sm80, sm89, sm90, sm100, sm120, gfx942, gfx950")
    parser.add_argument("--cover", type=int, choices=(0, 1, 2), default=0, help="0 compiles everything (default)")
    options = parser.parse_args()

    def examples_of(device: DeviceInfo) -> Iterator[Example]:
        yield from op_examples(device)
        yield from backend_examples(device, plugin_packages())

    chosen = partial(choose, strength=options.cover)
    return check_targets(options.targets, examples_of, jobs=os.cpu_count() or 1, choose=chosen, hazards=hazards)


if __name__ == "__main__":
    sys.exit(main())
