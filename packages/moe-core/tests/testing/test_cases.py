"""Cases cover the claims, and nothing but the claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_core
import pytest
import torch
from moe_core import (
    GATED,
    Claims,
    ConfigError,
    DeviceInfo,
    FusedMoEActivationFormat,
    GroupShape,
    KeyPattern,
    MoEActivation,
    RoutingMethodType,
    any_device,
    cuda,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kInt4Static,
)
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.environment import Requirement
from moe_core.testing.cases import BUDGETS, Case, conformance_cases, covered_keys, expand_keys
from moe_core.testing.data import make_inputs
from moe_core_toys import MonolithicToyExperts, ToyExperts

CPU = DeviceInfo.parse("cpu")


def with_claims(**changed: Any) -> type[TorchExperts]:
    base = Claims(devices=(any_device(),), keys=((None, None),), activations=frozenset({MoEActivation.SILU}))
    return type("Made", (TorchExperts,), {"claims": replace(base, **changed)})


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_claimed_value_occurs(budget: str) -> None:
    pattern = KeyPattern(
        kInt4Static, group_shapes=(GroupShape(1, 32), GroupShape(1, -1)), scale_dtypes=(torch.bfloat16, torch.float16)
    )
    experts = with_claims(
        keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym), (pattern, None)),
        activations=GATED,
        bias=True,
        apply_router_weight_on_input=True,
        formats=frozenset(FusedMoEActivationFormat),
        hidden_multiple=16,
    )
    cases = [c for c in conformance_cases(experts, target=CPU, budget=budget) if c.check == "values"]
    configs = [c.config for c in cases]
    assert {(c.weight_key, c.activation_key) for c in cases} == set(expand_keys(experts.claims))
    assert len(expand_keys(experts.claims)) == 5
    assert {c.activation for c in configs} == GATED
    assert {c.params.limit for c in configs if c.activation is MoEActivation.SWIGLUOAI} == {7.0, 0.75, float("inf")}
    assert {c.params.alpha for c in configs if c.activation is MoEActivation.SWIGLUOAI} == {1.702, 1.25}
    assert {c.tokens for c in cases} == {0, 1, 3, 17, 64, 257}
    assert {c.dtype for c in configs} == {torch.bfloat16, torch.float16}
    assert {c.has_bias for c in configs} == {False, True}
    assert {c.local_experts < c.num_experts for c in configs} == {False, True}
    assert {c.apply_router_weight_on_input for c in configs} == {False, True}
    assert {c.activation_format for c in configs} == set(FusedMoEActivationFormat)
    assert {c.ids_dtype for c in cases} == {torch.int32, torch.int64}
    assert {c.strided for c in cases} == {False, True}
    assert {c.routing for c in cases} == {"uniform", "idle", "one", "invalid", "nothing"}
    assert {1, 2} <= {c.top_k for c in configs}
    assert any(c.top_k == c.num_experts for c in configs)
    assert {c.hidden_size % 32 for c in configs} == {0, 16}
    assert any(c.hidden_size % 128 for c in configs)
    assert any(c.intermediate_size % 2 for c in configs)


def test_what_misleads_meets_experts_that_can_be_misled() -> None:
    experts = with_claims(apply_router_weight_on_input=True, formats=frozenset(FusedMoEActivationFormat))
    cases = [c for c in conformance_cases(experts, target=CPU) if c.check == "values"]
    numbers: set[int] = set()
    ids: set[int] = set()
    for case in cases:
        config = case.config
        inputs = make_inputs(config, case.tokens, seed=case.seed, routing=case.routing, ids_dtype=case.ids_dtype)
        if config.activation_format is FusedMoEActivationFormat.BATCHED:
            continue
        ids |= set(inputs.topk_ids.flatten().tolist())
        if inputs.expert_map is not None:
            numbers |= {
                n if n < config.local_experts else n - config.local_experts + 1000 for n in inputs.expert_map.tolist()
            }
            strided = inputs.strided().expert_map
            assert strided is not None
            assert torch.equal(strided, inputs.expert_map)
            assert not strided.is_contiguous()
    assert {-1, -7, 1000, 1090} <= numbers
    assert any(2**32 <= i < 2**32 + 64 for i in ids)
    assert any(-(2**33) <= i < 64 - 2**33 for i in ids)
    assert any(
        c.config.apply_router_weight_on_input
        and c.tokens == 17
        and c.routing == "uniform"
        and c.config.activation_format is FusedMoEActivationFormat.STANDARD
        for c in cases
    )


def test_nothing_but_the_claims_occurs() -> None:
    experts = with_claims(expert_map=False, activation_limit=False, dtypes=frozenset({torch.float32}), max_top_k=1)
    cases = conformance_cases(experts, target=CPU, budget="full")
    assert cases
    for case in cases:
        config = case.config
        assert not config.has_bias
        assert not config.apply_router_weight_on_input
        assert config.local_experts == config.num_experts
        assert config.activation is MoEActivation.SILU
        assert config.activation_params is None
        assert config.dtype is torch.float32
        assert config.top_k == 1
        assert config.activation_format is FusedMoEActivationFormat.STANDARD


def test_limits_occur_with_the_activations_that_honour_them() -> None:
    both = frozenset({MoEActivation.SILU, MoEActivation.GELU})
    experts = with_claims(activations=both, activation_limit=frozenset({MoEActivation.SILU}))
    limited = {c.config.activation for c in conformance_cases(experts, target=CPU) if c.config.activation_params}
    assert limited == {MoEActivation.SILU}


def test_every_pair_occurs_in_the_full_budget() -> None:
    experts = with_claims(activations=GATED, bias=True, dtypes=frozenset({torch.bfloat16, torch.float32}))
    cases = [c for c in conformance_cases(experts, target=CPU, budget="full") if c.check == "values"]
    held = {(c.config.activation, c.config.has_bias, c.config.dtype) for c in cases}
    for activation in GATED:
        assert {bias for a, bias, _ in held if a is activation} == {False, True}
        assert {dtype for a, _, dtype in held if a is activation} == {torch.bfloat16, torch.float32}
    assert {(c.tokens, c.config.num_experts) for c in cases} >= {(m, e) for m in (1, 257) for e in (3, 4, 5, 8, 64)}


def test_monolithic_experts_get_every_claimed_routing() -> None:
    methods = frozenset({RoutingMethodType.Default, RoutingMethodType.Llama4, RoutingMethodType.DeepSeekV3})
    experts = type(
        "Made", (MonolithicToyExperts,), {"claims": replace(MonolithicToyExperts.claims, routing_methods=methods)}
    )
    cases = [c for c in conformance_cases(experts, target=CPU) if c.check == "values"]
    assert {c.config.routing.method for c in cases if c.config.routing is not None} == methods
    assert all(c.config.routing is not None for c in cases)
    assert all(c.config.top_k == 1 for c in cases if c.config.routing.method is RoutingMethodType.Llama4)  # type: ignore[union-attr]


def test_ids_tell_cases_apart_and_repr_evaluates_back() -> None:
    cases = conformance_cases(ToyExperts, target=CPU, budget="full")
    assert len({c.id for c in cases}) == len(cases)
    names = {name: getattr(moe_core, name) for name in moe_core.__all__} | {
        "Case": Case,
        "torch": torch,
        "inf": float("inf"),
    }
    for case in cases:
        again = eval(repr(case), names)
        assert again == case
        assert again.seed == case.seed


def test_a_device_that_is_not_claimed_has_no_cases() -> None:
    experts = with_claims(devices=(cuda(min=90),))
    assert not conformance_cases(experts, target=CPU)
    assert conformance_cases(experts, target=DeviceInfo.parse("sm90"))


def test_what_is_not_installed_is_the_reason_against_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no row is searched for, which takes long where all are refused."""
    monkeypatch.setattr("moe_core.testing.cases.covering_rows", pytest.fail)
    experts = with_claims(activations=GATED, requires=(Requirement("no_such_library", "no-such-library"),))
    cases = conformance_cases(experts, target=CPU)
    assert len(cases) > len(GATED)
    assert {case.check for case in cases} == {"claims"}
    assert all("no-such-library, which is not installed" in case.reason for case in cases)


def test_gpu_checks_come_with_a_gpu() -> None:
    checks = {c.check for c in conformance_cases(ToyExperts, target=CPU, on_gpu=True)}
    assert checks == {
        "values", "convert", "reload", "compile", "opcheck", "refusals", "graph", "sync", "memory", "many_rows", "nan",
        "large", "range",
    }  # fmt: skip
    no_graph = with_claims(cuda_graph=False)
    assert not {"graph", "sync"} & {c.check for c in conformance_cases(no_graph, target=CPU, on_gpu=True)}


def test_every_pair_of_keys_meets_many_rows_on_a_gpu() -> None:
    cases = [c for c in conformance_cases(ToyExperts, target=CPU, on_gpu=True) if c.check == "many_rows"]
    keys = covered_keys(ToyExperts.claims)
    wide, narrow = cases[: len(keys)], cases[len(keys) :]
    for found in (wide, narrow):
        assert {(c.weight_key, c.activation_key) for c in found} == set(keys)
        assert all(c.config.max_num_tokens in (None, c.tokens) for c in found)
        # ids that select no expert leave gaps that few tokens don't show
        assert found[0].routing == "invalid"
    for case in wide:
        assert case.tokens / case.config.num_experts >= 512
        assert case.config.hidden_size >= 2048
        assert case.config.intermediate_size >= 1024
    for case in narrow:
        assert case.tokens / case.config.num_experts > 96
        assert 0 < case.config.intermediate_size % 128 <= 64


def test_many_rows_of_a_narrow_layer_are_looked_at_without_a_gpu() -> None:
    cases = [c for c in conformance_cases(ToyExperts, target=CPU) if c.check == "many_rows"]
    assert len(cases) == 1
    assert cases[0].tokens > 192
    assert cases[0].config.is_gated
    assert 0 < cases[0].config.intermediate_size % 128 <= 64


def large(experts: type[Any], **budget: Any) -> list[Case]:
    return [c for c in conformance_cases(experts, target=CPU, **budget) if c.check == "large"]


@pytest.mark.parametrize("budget", [{}, {"budget": "full"}, {"on_gpu": True}], ids=str)
def test_every_budget_has_large_layers(budget: dict[str, Any]) -> None:
    keys = ((kFp8Static128BlockSym, kFp8Dynamic128Sym), (kFp8Static128BlockSym, None))
    cases = large(with_claims(keys=keys, formats=frozenset(FusedMoEActivationFormat), lora=True), **budget)
    many = [case for case in cases if case.config.num_experts == 64]
    long = [case for case in cases if case.config.hidden_size > 1024]
    assert len(cases) == len(many) + len(long) == (4 if budget else 2)
    assert {(case.weight_key, case.activation_key) for case in cases} == set(keys)
    assert all(case.config.top_k == 8 for case in many)
    assert all(case.config.hidden_size % 64 for case in long)
    assert not any(case.config.is_lora_enabled for case in cases)
    assert all(case.config.activation_format is FusedMoEActivationFormat.STANDARD for case in cases)


def test_large_layers_are_within_the_claims() -> None:
    few, row = large(with_claims(max_experts=5, max_top_k=2, hidden_multiple=48, intermediate_multiple=128))
    assert (few.config.num_experts, few.config.top_k) == (5, 2)
    assert (row.config.hidden_size, row.config.intermediate_size) == (23 * 48, 128)
    # groups of the weights must be whole: more columns than the multiples ask for
    keys = ((kFp8Static128BlockSym, kFp8Dynamic128Sym),)
    assert [c.config.hidden_size % 128 for c in large(with_claims(keys=keys, whole_groups=True))] == [0, 0]


def test_a_budget_is_small_or_full() -> None:
    with pytest.raises(ConfigError, match="small or"):
        conformance_cases(ToyExperts, target=CPU, budget="huge")
