"""Layers drawn at random from claims."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    ConfigError,
    FusedMoEConfig,
    Requirement,
    any_device,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from moe_core.reference.torch_experts import TorchExperts
from moe_core.testing import cases_for, run_case
from moe_core.testing.cases import Case
from moe_core.testing.data import SKEWED, make_inputs
from moe_core.testing.random_cases import parse_budget


class Some(TorchExperts):
    interface_api = (1, 0)
    claims = Claims(
        devices=(any_device(),),
        keys=((None, None), (kFp8Static128BlockSym, kFp8Dynamic128Sym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        bias=True,
        apply_router_weight_on_input=True,
        hidden_multiple=16,
        max_experts=12,
        max_top_k=3,
        cuda_graph=False,
    )


class SquaresWeights(Some):
    def apply(self, *arguments, topk_weights, **named):  # type: ignore[no-untyped-def]
        super().apply(*arguments, topk_weights=topk_weights.square(), **named)


class RefusesAll(Some):
    @classmethod
    def extra_reasons(cls, *arguments: object) -> list[str]:
        return ["not today"]


def test_each_case_follows_from_seed_and_number_alone() -> None:
    few, many = cases_for(Some, device="cpu", budget="random:3:5"), cases_for(Some, device="cpu", budget="random:9:5")
    assert many[:3] == few
    assert len(many) == 9
    assert cases_for(Some, device="cpu", budget="random:3") == cases_for(Some, device="cpu", budget="random:3:0")
    others = [cases_for(Some, device="cpu", budget=f"random:9:{seed}") for seed in (1, 2, 3)]
    assert all(not set(one) & set(other) for one, other in itertools.combinations([many, *others], 2))


def test_cases_stay_within_the_claims_and_vary() -> None:
    cases = cases_for(Some, device="cpu", budget="random:60")
    configs = [case.config for case in cases]
    assert all(config.hidden_size % 16 == 0 for config in configs)
    assert max(config.num_experts for config in configs) <= 12
    assert max(config.top_k for config in configs) == 3
    for vary in (
        {config.num_experts for config in configs},
        {config.hidden_size for config in configs},
        {config.intermediate_size for config in configs},
        {case.tokens for case in cases},
        {config.activation for config in configs},
    ):
        assert len(vary) >= 8
    for name, count in (("dtype", 2), ("has_bias", 2), ("apply_router_weight_on_input", 2)):
        assert len({getattr(config, name) for config in configs}) == count, name
    assert {case.weight_key for case in cases} == {None, kFp8Static128BlockSym}
    assert any(config.local_experts < config.num_experts for config in configs)


def failure_of(experts: type[TorchExperts], case: Case) -> str:
    """What a case says against the experts, or nothing."""
    try:
        run_case(experts, case, device="cpu")
    except AssertionError as error:
        return str(error)
    return ""


def test_sound_experts_pass_and_wrong_ones_do_not() -> None:
    sound = cases_for(Some, device="cpu", budget="random:12")
    for case in sound:
        run_case(Some, case, device="cpu")
    found = [failure_of(SquaresWeights, case) for case in cases_for(SquaresWeights, device="cpu", budget="random:12")]
    assert sum("router weight" in text for text in found) >= 6


def test_a_class_that_refuses_its_own_claims_is_an_error() -> None:
    with pytest.raises(ConfigError, match="RefusesAll"):
        cases_for(RefusesAll, device="cpu", budget="random:1")


def test_a_class_without_its_library_has_no_cases() -> None:
    class NeedsMore(Some):
        claims = replace(Some.claims, requires=(Requirement("no_such_library", "no-such-library"),))

    assert cases_for(NeedsMore, device="cpu", budget="random:2") == []


@pytest.mark.parametrize(
    "text", ["random", "random:", "random:0", "random:-1", "random:1:2:3", "random:x", "large", ""]
)
def test_a_budget_that_does_not_exist_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="budget|number"):
        cases_for(Some, device="cpu", budget=text)


def test_budgets_are_parsed() -> None:
    assert parse_budget("random:30:7") == (30, 7)
    assert parse_budget("full") is None


def test_skewed_routing_follows_zipfs_law() -> None:
    experts, tokens = 16, 40_000
    config = FusedMoEConfig(experts, 1, 16, 16, dtype=torch.float32)
    ids = make_inputs(config, tokens, seed=3, routing=SKEWED).topk_ids
    found = torch.bincount(ids.flatten(), minlength=experts).sort(descending=True).values / tokens
    wanted = 1 / torch.arange(1, experts + 1)
    wanted /= wanted.sum()
    # five standard deviations of a share of so many draws
    assert ((found - wanted).abs() <= 5 * (wanted / tokens).sqrt()).all()
    several = make_inputs(replace(config, top_k=4), 100, seed=3, routing=SKEWED).topk_ids
    assert all(len(set(row)) == 4 for row in several.tolist())
