"""Expected numbers of ranks and experts, against routing that is counted."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from moe_core.parallel.distributed.uniform_routing import active_experts, expected_ranks, hit_probability


def test_a_token_goes_to_as_many_ranks_as_sets_of_experts_say() -> None:
    experts, top_k = 6, 3
    for ep_size in (1, 2, 3, 4, 6):
        each, more = divmod(experts, ep_size)
        rank_of = [rank for rank in range(ep_size) for _ in range(each + (rank < more))]
        sets = list(itertools.combinations(range(experts), top_k))
        counted = Fraction(sum(len({rank_of[expert] for expert in chosen}) for chosen in sets), len(sets))
        assert expected_ranks(experts, ep_size, top_k) == counted


def test_probabilities_at_their_ends() -> None:
    assert hit_probability(8, 8, 1) == 1
    assert hit_probability(8, 0, 8) == 0
    assert hit_probability(8, 1, 8) == 1
    # DeepSeek-V3 on 32 ranks: 8 of 256 experts, 8 per rank; 1 - (248 * ... * 241) / (256 * ... * 249) = 0.22709
    assert float(expected_ranks(256, 32, 8)) == pytest.approx(7.2668, abs=1e-4)
    assert active_experts(8, 4, 2, 1) == 1
    assert active_experts(8, 4, 2, 2) == 4 * (1 - 0.75**2)
    assert active_experts(8, 4, 8, 1) == 4
