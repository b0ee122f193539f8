"""Covering arrays hold what they promise."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core.testing.covering import Row, covering_rows

FACTORS = {"a": [1, 2, 3, 4], "b": ["x", "y", "z"], "c": [False, True], "d": [None, 0.5], "e": [7]}


def anything(row: Row) -> bool:
    return True


def test_every_value_occurs() -> None:
    rows = covering_rows(FACTORS, anything, paired=())
    assert len(rows) == 4
    for name, values in FACTORS.items():
        assert {row[name] for row in rows} == set(values)


def test_every_pair_of_paired_factors_occurs() -> None:
    rows = covering_rows(FACTORS, anything, paired=("a", "b", "c"))
    for one, other in itertools.combinations(("a", "b", "c"), 2):
        held = {(row[one], row[other]) for row in rows}
        assert held == set(itertools.product(FACTORS[one], FACTORS[other]))
    assert {row["d"] for row in rows} == {None, 0.5}
    # 4 x 3 pairs need 12 rows; a greedy search comes near
    assert 12 <= len(rows) <= 14


def test_what_is_not_allowed_is_left_out() -> None:
    rows = covering_rows(FACTORS, lambda row: not (row["a"] == 4 and row["c"]), paired=tuple(FACTORS))
    held = {(row["a"], row["c"]) for row in rows}
    assert held == set(itertools.product(FACTORS["a"], FACTORS["c"])) - {(4, True)}
    assert not covering_rows(FACTORS, lambda row: False, paired=())


def test_fillers_stand_where_nothing_is_left_to_cover() -> None:
    rows = covering_rows({"many": list(range(40)), "few": [1, 2, 257]}, anything, paired=(), fillers={"few": [1, 2]})
    assert [row["few"] for row in rows].count(257) == 1


def test_is_deterministic() -> None:
    assert covering_rows(FACTORS, anything, paired=("a", "b")) == covering_rows(FACTORS, anything, paired=("a", "b"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 6))
def test_any_sizes(sizes: list[int], paired: int) -> None:
    factors = {str(number): list(range(size)) for number, size in enumerate(sizes)}
    rows = covering_rows(factors, anything, paired=list(factors)[:paired])
    for name, values in factors.items():
        assert {row[name] for row in rows} == set(values)
    for one, other in itertools.combinations(list(factors)[:paired], 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(factors[one], factors[other]))


def test_what_must_meet_meets_in_one_row() -> None:
    factors = {"a": [0, 1, 2], "b": [0, 1], "c": ["x", "y"]}
    wanted = {"a": 2, "b": 1, "c": "y"}
    rows = covering_rows(factors, lambda row: True, paired=[], together=[wanted, {"a": 3, "b": 0}])
    assert wanted in rows
    assert rows == [row for row in rows if row["a"] in factors["a"]]
