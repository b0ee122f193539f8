"""Choice between vectors and tiles for few tokens: by cost, so near the faster one for any number of experts."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moe_core.kernels.gemm.heuristics import LayerProblem, gemv_plan
from moe_core.kernels.gemm.heuristics.gemv import GemvRules
from moe_core.kernels.gemm.heuristics.rules import rules_of

SCHEMES: dict[str, dict[str, Any]] = {
    "fp8_block": {"family": "scaled_mm", "element": "e4m3", "group_size": 128},
    "fp8_channel": {"family": "scaled_mm", "element": "e4m3"},
    "int8_channel": {"family": "scaled_mm", "element": "int8"},
    "int4": {"family": "mixed_input", "element": "int4"},
    "mxfp4": {"family": "mixed_input", "element": "e2m1"},
    "int8_w8a16": {"family": "mixed_input", "element": "int8"},
    "fp8_w8a16": {"family": "mixed_input", "element": "e4m3"},
}
MEASURED = json.loads((Path(__file__).parent / "few_tokens.json").read_text(encoding="utf-8"))


def problem_of(scheme: str, experts: int, top_k: int, hidden: int, inner: int, gated: bool = True) -> LayerProblem:
    sizes = {"num_experts": experts, "top_k": top_k, "hidden_size": hidden, "intermediate_size": inner}
    return LayerProblem(**SCHEMES[scheme], **sizes, gated=gated)


def excess(scheme: str, routing: str) -> Iterator[tuple[str, int, float]]:
    """Yield (layer, tokens, time of the choice over the faster one) of measured calls."""
    for one, name, drawn, times in MEASURED["times"]:
        if (one, drawn) != (scheme, routing):
            continue
        problem = problem_of(scheme, *MEASURED["layers"][name])
        for tokens, (vectors, tiles) in times.items():
            chosen = tiles if gemv_plan(problem, int(tokens)) is None else vectors
            yield name, int(tokens), chosen / min(vectors, tiles)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_choice_is_near_the_faster_of_both_as_measured(scheme: str) -> None:
    found = list(excess(scheme, "uniform"))
    assert len(found) >= 30
    assert math.exp(sum(math.log(ratio) for *_, ratio in found) / len(found)) < 1.005
    # times of a call vary by a few percent
    assert not [one for one in found if one[-1] > 1.12]


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel", "int8_channel", "int4", "mxfp4"])
def test_skewed_routing_loses_little(scheme: str) -> None:
    """Popular experts have more pairs than uniform routing would give them, which favors tiles."""
    found = [ratio for *_, ratio in excess(scheme, "zipf")]
    assert len(found) >= 25
    assert math.exp(sum(map(math.log, found)) / len(found)) < 1.02


def layers() -> Iterator[tuple[GemvRules, LayerProblem]]:
    for scheme in SCHEMES:
        for experts, top_k in ((8, 2), (16, 1), (32, 4), (64, 8), (128, 8), (256, 8), (512, 10), (512, 22), (512, 32)):
            for hidden, inner in ((1024, 2688), (2048, 768), (4096, 1408), (4096, 14336), (7168, 256), (7168, 2048)):
                problem = problem_of(scheme, experts, top_k, hidden, inner)
                rule = rules_of(problem).gemv
                assert rule is not None
                yield rule, problem


def test_modeled_time_grows_with_the_work_only() -> None:
    """One more token may cost its share of pairs and 10 %: a choice by the number of tokens would jump."""
    changes = 0
    for rule, problem in layers():
        times, kinds = [], []
        for tokens in range(1, rule.most + 1):
            vectors, tiles = rule.times(problem, tokens)
            kinds.append(gemv_plan(problem, tokens) is not None)
            times.append(vectors if kinds[-1] else tiles)
        changes += len(set(kinds)) - 1
        for tokens, (now, then) in enumerate(itertools.pairwise(times), 1):
            assert then <= 1.1 * now * (tokens + 1) / tokens, (problem, tokens)
        # once tiles are faster, they stay faster
        assert kinds == sorted(kinds, reverse=True), problem
    assert changes > 50


def test_many_small_pairs_take_tiles_sooner_than_few() -> None:
    """The number of pairs decides, not that of tokens: 22 experts per token share more weights than two do."""
    for scheme in ("fp8_block", "fp8_channel", "int8_channel"):
        most = []
        for top_k in (2, 8, 22):
            problem = problem_of(scheme, 512, top_k, 1024, 2688, gated=False)
            most.append(max(tokens for tokens in range(1, 20) if gemv_plan(problem, tokens)))
        assert most == sorted(most, reverse=True)
        assert most[0] > most[-1]
