"""Covering arrays: few rows with every value of some factors and every pair of others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Choice = tuple[int, int]  # factor number, value number
_Target = tuple[_Choice, ...]  # one choice or two, in the order of the factors

#: number of completions of a row that are tried before a combination counts as impossible; a single value gets more
#: tries, since it may be allowed with few others
TRIES, SINGLE_TRIES = 24, 240


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    paired: Collection[str],
    together: Sequence[Mapping[str, Any]] = (),
    fillers: Mapping[str, Sequence[Any]] | None = None,
    seed: int = 0,
) -> list[Row]:
    """Return few rows that contain every value, and every pair of values of two paired factors.

    The search is greedy and deterministic. The first factor's values come in order, and each row takes the values that
    cover most of the remaining combinations. Combinations for which no allowed row is found are left out.

    Args:
        factors: Values of each factor, by name.
        allowed: Whether a row is allowed.
        paired: Factors whose values are covered in pairs.
        together: Combinations of values that must occur in one row. A combination with a value that its factor lacks is
            ignored.
        fillers: Values that a factor takes if nothing remains to be covered.
        seed: Seed of the search.

    Returns:
        The rows, each with one value per factor.
    """
    names = list(factors)
    values = [list(factors[name]) for name in names]
    generator = random.Random(seed)
    choices = [(f, v) for f, options in enumerate(values) for v in range(len(options))]
    targets: list[_Target] = [
        pair
        for pair in itertools.combinations([c for c in choices if names[c[0]] in paired], 2)
        if pair[0][0] != pair[1][0]
    ]
    numbers = [{name: _index(values[names.index(name)], wanted[name]) for name in wanted} for wanted in together]
    joined = [
        tuple(sorted((names.index(name), v) for name, v in found.items() if v is not None))
        for found in numbers
        if None not in found.values()
    ]
    open_targets = dict.fromkeys([*joined, *targets, *((choice,) for choice in choices)])
    spare = [
        [v for v, x in enumerate(values[f]) if x in (fillers or {}).get(n, values[f])] for f, n in enumerate(names)
    ]
    rows: list[Row] = []

    def as_row(picked: Sequence[int]) -> Row:
        return {name: values[f][picked[f]] for f, name in enumerate(names)}

    while open_targets:
        target = next(iter(open_targets))
        found = _complete(target, values, spare, open_targets, lambda p: allowed(as_row(p)), generator)
        if found is None:
            del open_targets[target]
            continue
        rows.append(as_row(found))
        held = list(enumerate(found))
        for combination in (*itertools.combinations(held, 2), *((choice,) for choice in held)):
            open_targets.pop(combination, None)
        for combination in joined:
            if set(combination) <= set(held):
                open_targets.pop(combination, None)
    return rows


def _index(options: Sequence[Any], value: Any) -> int | None:
    return options.index(value) if value in options else None


def _complete(
    target: _Target,
    values: Sequence[Sequence[Any]],
    spare: Sequence[Sequence[int]],
    open_targets: Mapping[_Target, None],
    allowed: Callable[[Sequence[int]], bool],
    generator: random.Random,
) -> list[int] | None:
    """Return a row that contains ``target`` and covers many open targets, or None."""
    for attempt in range(TRIES if len(target) > 1 else SINGLE_TRIES):
        picked: dict[int, int] = dict(target)
        order = [f for f in range(len(values)) if f not in picked]
        generator.shuffle(order)
        for factor in order:
            options = list(range(len(values[factor])))
            generator.shuffle(options)
            # Later attempts are random, to avoid combinations that are not allowed.
            greedy = attempt < TRIES // 2
            gains = [_gain((factor, v), picked, open_targets) for v in options] if greedy else [0]
            if max(gains) > 0:
                picked[factor] = options[gains.index(max(gains))]
            else:
                picked[factor] = generator.choice(spare[factor] or options)
        row = [picked[f] for f in range(len(values))]
        if allowed(row):
            return row
    return None


def _gain(choice: _Choice, picked: Mapping[int, int], open_targets: Mapping[_Target, None]) -> int:
    """Number of open targets that ``choice`` would cover, given the picked values."""
    # This function is called millions of times.
    found = int((choice,) in open_targets)
    for other in picked.items():
        if ((choice, other) if choice < other else (other, choice)) in open_targets:
            found += 1
    return found
