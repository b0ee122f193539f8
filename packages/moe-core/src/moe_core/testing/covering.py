"""Covering arrays: few rows in which every value, or every pair of values, of some factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_Choice = tuple[int, int]  # factor number, value number

#: completions of one row that are tried before a combination counts as impossible
TRIES = 24


def covering_rows(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    strength: int,
    seed: int = 0,
) -> list[Row]:
    """Rows (one value per factor) that together hold every combination of ``strength`` values (1 or 2).

    Combinations for which no allowed row is found are left out.  Greedy and deterministic: the first factor's values
    come in order, and each row takes what covers most of what is left.
    """
    names = list(factors)
    values = [list(factors[name]) for name in names]
    generator = random.Random(seed)
    choices = [(f, v) for f, options in enumerate(values) for v in range(len(options))]
    targets: list[tuple[_Choice, ...]]
    if strength == 1:
        targets = [(choice,) for choice in choices]
    else:
        targets = [pair for pair in itertools.combinations(choices, 2) if pair[0][0] != pair[1][0]]
    open_targets = dict.fromkeys(targets)
    rows: list[Row] = []

    def as_row(picked: Sequence[int]) -> Row:
        return {name: values[f][picked[f]] for f, name in enumerate(names)}

    while open_targets:
        target = next(iter(open_targets))
        found = _complete(target, values, open_targets, strength, lambda p: allowed(as_row(p)), generator)
        if found is None:
            del open_targets[target]
            continue
        rows.append(as_row(found))
        held = list(enumerate(found))
        for combination in itertools.combinations(held, strength):
            open_targets.pop(combination, None)
    return rows


def _complete(
    target: tuple[_Choice, ...],
    values: Sequence[Sequence[Any]],
    open_targets: Mapping[tuple[_Choice, ...], None],
    strength: int,
    allowed: Callable[[Sequence[int]], bool],
    generator: random.Random,
) -> list[int] | None:
    """A row that holds ``target`` and covers much of what is open, or None."""
    for attempt in range(TRIES):
        picked: dict[int, int] = dict(target)
        order = [f for f in range(len(values)) if f not in picked]
        generator.shuffle(order)
        for factor in order:
            options = list(range(len(values[factor])))
            generator.shuffle(options)
            if attempt < TRIES // 2:  # later attempts are random, to get around what is not allowed
                options.sort(key=lambda v: -_gain((factor, v), picked, open_targets, strength))
            picked[factor] = options[0]
        row = [picked[f] for f in range(len(values))]
        if allowed(row):
            return row
    return None


def _gain(
    choice: _Choice, picked: Mapping[int, int], open_targets: Mapping[tuple[_Choice, ...], None], strength: int
) -> int:
    if strength == 1:
        return int((choice,) in open_targets)
    return sum(tuple(sorted((choice, other))) in open_targets for other in picked.items())
