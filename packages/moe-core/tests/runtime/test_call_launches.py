"""The numbers of tokens that are looked at stand for all others."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st
from moe_core.runtime.call_launches import representatives


@given(
    most=st.integers(1, 900),
    changes=st.lists(st.integers(1, 900), max_size=6),
    thresholds=st.lists(st.integers(1, 900), max_size=4),
    factor=st.integers(1, 9),
    specialized=st.sampled_from([(), ("threshold",), ("always",)]),
)
@settings(deadline=None, max_examples=80)
def test_no_number_of_tokens_needs_another_kernel(
    most: int, changes: list[int], thresholds: list[int], factor: int, specialized: tuple[str, ...]
) -> None:
    def choice(tokens: int) -> Hashable:
        # returns to what it was
        return sum(tokens >= change for change in changes) % 2

    def kinds(tokens: int) -> frozenset[Hashable]:
        size = factor * tokens
        kind = 1 if size == 1 else 16 if size % 16 == 0 else 0
        above = sum(tokens > threshold for threshold in thresholds)
        seen = kind if "always" in specialized or ("threshold" in specialized and above % 2) else None
        return frozenset({("tile", choice(tokens)), ("sort", above, seen)})

    chosen = representatives(most, choice, kinds)
    assert all(1 <= tokens <= most for tokens in chosen)
    every = frozenset[Hashable]().union(*map(kinds, range(1, most + 1)))
    assert frozenset[Hashable]().union(*map(kinds, chosen)) == every


def test_few_are_looked_at() -> None:
    asked: list[int] = []

    def kinds(tokens: int) -> frozenset[Hashable]:
        asked.append(tokens)
        return frozenset({tokens > 1000})

    representatives(16384, lambda tokens: tokens.bit_length(), kinds)
    assert len(set(asked)) < 300
