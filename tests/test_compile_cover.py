"""What is left out of a covering choice of launches occurs in another launch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core.kernels.launch.compile_target import Target
from moe_core.testing.launches import Compilation
from moe_kit.compile import choose

TARGETS = {name: Target.parse(name) for name in ("sm80", "sm90", "gfx950")}


def launch(target: str, kernel: str, values: frozenset[Any]) -> Compilation:
    return Compilation("", TARGETS[target], SimpleNamespace(__name__=kernel), (), {}, 0, values)


@st.composite
def launches(draw: st.DrawFn) -> list[Compilation]:
    size = {"small": 2, "large": 4}
    found = []
    for _ in range(draw(st.integers(0, 40))):
        kernel = draw(st.sampled_from(sorted(size)))
        values = frozenset((f"p{p}", draw(st.integers(0, 2))) for p in range(size[kernel])) | {("always", kernel)}
        found.append(launch(draw(st.sampled_from(["sm90", "gfx950"])), kernel, values))
    return found


def combinations(found: list[Compilation], size: int, *, by_target: bool) -> set[object]:
    return {
        (one.arch if by_target else "", one.name, *some)
        for one in found
        for some in itertools.combinations(sorted(one.values, key=str), size)
    }


@pytest.mark.parametrize("strength", [1, 2])
@given(found=launches())
@settings(deadline=None, max_examples=60)
def test_every_kernel_occurs_for_every_target_and_every_combination_for_one(strength, found) -> None:
    chosen = choose(found, strength)
    assert combinations(chosen, 0, by_target=True) == combinations(found, 0, by_target=True)
    for size in range(1, strength + 1):
        assert combinations(chosen, size, by_target=False) == combinations(found, size, by_target=False)


def test_few_are_chosen() -> None:
    grid = itertools.product(range(4), repeat=4)
    found = [launch("sm90", "k", frozenset(enumerate(values))) for values in grid]
    # 4 x 4 values of two parameters need 16 launches; greedy choices come near
    assert 16 <= len(choose(found, 2)) < 32
    assert 4 <= len(choose(found, 1)) < 8


def test_values_are_spread_over_the_targets() -> None:
    found = [launch(t, "k", frozenset({("a", i)})) for t in ("sm80", "sm90") for i in range(64)]
    chosen = choose(found, 2)
    assert len(chosen) == 64
    assert 16 < sum(one.arch == "sm80" for one in chosen) < 48
    assert choose(found, 2) == chosen
