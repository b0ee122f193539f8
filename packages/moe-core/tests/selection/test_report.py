"""Claims, the selection loop and its report."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from moe_core import (
    ActivationParams,
    Backend,
    BackendRefusedError,
    ConfigError,
    DeviceInfo,
    Environment,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    MoEActivation,
    NoBackendError,
    Requirement,
    RoutingConfig,
    RoutingMethodType,
    SelectionError,
    UnknownBackendError,
    Verified,
    cuda,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kInt4Static,
)
from moe_core_toys import PLAIN, TOY, BatchedToyExperts, GpuToyExperts, MonolithicToyExperts, ToyExperts, toy_oracle

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=48)
SM90, SM80, CPU = (DeviceInfo.parse(name) for name in ("sm90", "sm80", "cpu"))


def select(config: FusedMoEConfig = CONFIG, device: DeviceInfo = CPU, backend: str = "auto", **kwargs: object):  # type: ignore[no-untyped-def]
    return toy_oracle().select(
        config, weight_key=None, activation_key=None, device=device, moe_backend=backend, **kwargs
    )


def test_auto_takes_the_first_that_fits_on_the_asked_for_device() -> None:
    assert select(device=SM90).experts is GpuToyExperts
    assert select(device=CPU).experts is ToyExperts
    assert select(replace(CONFIG, has_bias=True), device=SM90).backend == "plain"


def test_the_class_of_a_backend_follows_the_activation_format() -> None:
    batched = replace(CONFIG, activation_format=FusedMoEActivationFormat.BATCHED)
    assert select(batched).experts is BatchedToyExperts


def test_a_named_backend_is_refused_with_every_reason_never_replaced() -> None:
    with pytest.raises(SelectionError) as caught:
        select(replace(CONFIG, has_bias=True), device=SM80, backend="gpu")
    text = str(caught.value)
    assert "backend 'gpu' does not fit, and is never replaced" in text
    assert "needs sm90 or newer, device is sm80" in text
    assert "does not add biases" in text
    gpu = next(c for c in caught.value.report.candidates if c.backend == "gpu")
    assert len(gpu.reasons) == 2


ALIASES = tuple(
    replace(backend, aliases=("plain", "own")) if backend.name == "gpu" else backend for backend in TOY.backends
)


def test_an_alias_asks_for_its_backends_and_the_one_of_that_name() -> None:
    def experts(name: str, device: DeviceInfo) -> object:
        oracle = toy_oracle(backends=ALIASES)
        selection = oracle.select(CONFIG, weight_key=None, activation_key=None, device=device, moe_backend=name)
        return selection.experts

    assert experts("plain", SM90) is GpuToyExperts
    assert experts("plain", CPU) is ToyExperts
    assert experts("own", SM90) is GpuToyExperts
    with pytest.raises(BackendRefusedError, match="'own' .*sm90"):
        experts("own", CPU)
    with pytest.raises(UnknownBackendError, match="plain, own"):
        experts("none", CPU)


def test_when_nothing_fits_every_candidate_is_listed_with_its_reasons() -> None:
    with pytest.raises(SelectionError) as caught:
        toy_oracle().select(CONFIG, weight_key=kFp8StaticChannelSym, activation_key=kFp8DynamicTokenSym, device=CPU)
    report = caught.value.report
    assert report.chosen is None
    assert [c.experts for c in report.candidates] == [GpuToyExperts, ToyExperts, BatchedToyExperts]
    assert all(c.reasons for c in report.candidates)
    assert all(c.experts.__name__ in str(caught.value) for c in report.candidates)


def test_unknown_backend_names_the_installed() -> None:
    with pytest.raises(ConfigError, match="backend 'none'"):
        select(backend="none")


def test_errors_are_what_engines_catch() -> None:
    def error(**request: object) -> SelectionError:
        with pytest.raises(SelectionError) as caught:
            select(**request)  # type: ignore[arg-type]
        assert caught.value.report.chosen is None
        assert len(caught.value.report.candidates) == 3
        return caught.value

    nothing = error(config=replace(CONFIG, batch_invariant=True))
    assert isinstance(nothing, NoBackendError)
    assert isinstance(nothing, NotImplementedError)
    assert not isinstance(nothing, ValueError)
    refused, unknown = error(backend="gpu"), error(backend="none")
    assert isinstance(refused, BackendRefusedError)
    assert isinstance(unknown, UnknownBackendError)
    for named in (refused, unknown):
        assert isinstance(named, ValueError)
        assert not isinstance(named, NotImplementedError)
    assert not isinstance(refused, ConfigError)


def test_a_selection_unpacks() -> None:
    selection = select(device=SM90)
    backend, experts = selection
    assert (backend, experts) == ("gpu", GpuToyExperts) == (selection.backend, selection.experts)


def test_report_reads_and_serializes() -> None:
    report = select(device=SM90).report
    assert "-> gpu [GpuToyExperts]: fits; not tested on hardware" in str(report)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["chosen"] == "gpu"
    assert [c["fits"] for c in data["candidates"]] == [True, True, False]


def test_a_refused_name_has_the_reason_of_the_backend_that_bears_it() -> None:
    class OlderExperts(ToyExperts):
        claims = replace(ToyExperts.claims, devices=(cuda(80, 88),))

    oracle = toy_oracle(backends=(Backend("older", (OlderExperts,), aliases=("gpu",)), *TOY.backends))
    with pytest.raises(BackendRefusedError, match="'gpu' .*sm90"):
        oracle.select(CONFIG, weight_key=None, activation_key=None, device=CPU, moe_backend="gpu")


def test_classes_for_other_keys_share_a_line_where_another_class_of_the_backend_takes_these() -> None:
    class OtherKeysExperts(ToyExperts):
        claims = replace(ToyExperts.claims, keys=((kFp8StaticChannelSym, kFp8DynamicTokenSym),))

    oracle = toy_oracle(backends=(*TOY.backends[:1], Backend("plain", (ToyExperts, OtherKeysExperts))))
    lines = str(oracle.select(CONFIG, weight_key=None, activation_key=None, device=CPU).report).splitlines()
    assert lines[-2].startswith("  -> plain [ToyExperts]: fits")
    assert lines[-1] == "     plain for other quant keys: OtherKeysExperts"
    other = oracle.select(CONFIG, weight_key=None, activation_key=None, device=CPU).report.candidates[-1]
    assert other.reasons
    assert not other.takes_keys
    with pytest.raises(SelectionError, match="GpuToyExperts"):
        oracle.select(
            CONFIG, weight_key=kFp8StaticChannelSym, activation_key=kFp8DynamicTokenSym, moe_backend="gpu", device=CPU
        )


def test_selection_does_not_look_at_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("selection asked torch for the current device")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    monkeypatch.setattr(torch.cuda, "get_device_properties", forbidden)
    assert select(device=SM90, environment=Environment({})).backend == "gpu"


def test_selection_takes_under_a_millisecond() -> None:
    oracle = toy_oracle()

    def once() -> float:
        start = time.process_time()
        oracle.select(CONFIG, weight_key=None, activation_key=None, device=SM90)
        return time.process_time() - start

    assert min(once() for _ in range(20)) < 1e-3


def reasons(claims_change: dict[str, object], config: FusedMoEConfig = CONFIG, **request: object) -> list[str]:
    claims = replace(PLAIN, **claims_change)  # type: ignore[arg-type]
    return claims.reasons_against(
        config,
        request.get("weight_key"),  # type: ignore[arg-type]
        request.get("activation_key"),  # type: ignore[arg-type]
        CPU,
        request.get("environment", Environment({})),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("claims", "config", "text"),
    [
        ({"devices": (cuda(80),)}, {}, "needs sm80 or newer, device is cpu"),
        ({"activations": frozenset({MoEActivation.SILU})}, {"activation": MoEActivation.GELU}, "activation gelu"),
        (
            {"activation_limit": False},
            {"activation_params": ActivationParams(limit=5.0)},
            "does not clamp the activation silu to 5.0",
        ),
        (
            {"activation_limit": frozenset({MoEActivation.GELU})},
            {"activation_params": ActivationParams(limit=5.0)},
            "does not clamp the activation silu to 5.0",
        ),
        ({"dtypes": frozenset({torch.float16})}, {}, "does not take hidden states in bfloat16, takes float16"),
        ({"bias": False}, {"has_bias": True}, "does not add biases"),
        ({"expert_map": False}, {"parallel": FusedMoEParallelConfig(ep_size=2)}, "does not take an expert map"),
        (
            {"apply_router_weight_on_input": False},
            {"top_k": 1, "apply_router_weight_on_input": True},
            "router weight on the input",
        ),
        ({}, {"activation_format": FusedMoEActivationFormat.BATCHED}, "batched activation format"),
        ({}, {"is_lora_enabled": True}, "LoRA"),
        ({}, {"batch_invariant": True}, "batch invariant"),
        ({"hidden_multiple": 128}, {}, "needs hidden_size to be a multiple of 128, got 64"),
        ({"intermediate_multiple": 32}, {}, "needs intermediate_size to be a multiple of 32, got 48"),
        ({"max_top_k": 1}, {}, "needs top_k <= 1, got 2"),
        ({"max_experts": 4}, {}, "needs at most 4 local experts, got 8"),
        (
            {"all2all": frozenset({"deepep"})},
            {"parallel": FusedMoEParallelConfig(ep_size=2, dp_size=2)},
            "all-to-all backend allgather_reducescatter",
        ),
        ({"routing_methods": frozenset({RoutingMethodType.Renormalize})}, {}, "the config has no routing"),
    ],
)
def test_each_claim_has_its_reason_and_no_other(
    claims: dict[str, object], config: dict[str, object], text: str
) -> None:
    found = reasons(claims, replace(CONFIG, num_local_experts=None, **config))  # type: ignore[arg-type]
    assert len(found) == 1
    assert text in found[0]
    # the same request under claims that cover it: the reason comes from the claim
    assert not reasons({}, CONFIG)


def test_sizes_are_whole_groups_where_that_is_claimed() -> None:
    claims = replace(PLAIN, keys=((kInt4Static, None),), whole_groups=True, hidden_multiple=96)
    assert claims.multiples(kInt4Static) == (384, 128)
    assert claims.multiples(kInt4Static.with_group(1, -1)) == (96, 1)
    assert replace(claims, whole_groups=False).multiples(kInt4Static) == (96, 1)
    change = {"keys": claims.keys, "whole_groups": True, "hidden_multiple": 96}
    assert reasons(change, weight_key=kInt4Static) == [
        "needs hidden_size to be a multiple of 384, for whole groups of 128, got 64",
        "needs intermediate_size to be a multiple of 128, for whole groups of 128, got 48",
    ]


def test_key_reasons_tell_what_is_offered() -> None:
    pair = {"keys": ((kFp8StaticChannelSym, kFp8DynamicTokenSym),)}
    assert reasons(pair, weight_key=kFp8StaticChannelSym, activation_key=kFp8DynamicTokenSym) == []
    (text,) = reasons(pair, weight_key=kFp8StaticChannelSym)
    assert "activations quantized as nothing (16-bit)" in text
    assert "takes kFp8DynamicTokenSym" in text
    (text,) = reasons(pair)
    assert "does not read weights quantized as nothing (16-bit)" in text


def test_hardware_counts_for_the_keys_that_ran_on_it() -> None:
    mine = ((kFp8StaticChannelSym, kFp8DynamicTokenSym), (None, None))
    claims = replace(PLAIN, keys=mine, verified_on=("cpu", Verified("H200", mine[:1])))
    assert claims.verified_for(*mine[0]) == ("cpu", "H200")
    assert claims.verified_for(None, None) == ("cpu",)
    assert str(claims.verified_on[1]).startswith("H200 for kFp8StaticChannelSym")
    experts = type("Made", (ToyExperts,), {"claims": claims})
    oracle = toy_oracle(backends=(Backend("plain", (experts,)),))
    report = oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu").report
    assert "fits; tested on cpu" in str(report)
    assert report.as_dict()["candidates"][0]["verified_on"] == ["cpu"]


def test_requirements_are_part_of_the_decision() -> None:
    needs = {"requires": (Requirement("flashinfer", "flashinfer-python", "0.7"),)}
    (text,) = reasons(needs)
    assert "needs flashinfer-python, which is not installed (pip install 'flashinfer-python>=0.7')" in text
    (text,) = reasons(needs, environment=Environment({"flashinfer-python": "0.6.9"}))
    assert "needs flashinfer-python >= 0.7, found 0.6.9" in text
    assert reasons(needs, environment=Environment({"flashinfer-python": "0.10.0"})) == []


def test_monolithic_experts_are_taken_for_their_routing_only() -> None:
    def check(method: RoutingMethodType) -> tuple[bool, str | None]:
        config = replace(CONFIG, routing=RoutingConfig.from_method(method))
        return MonolithicToyExperts.is_supported_config(config, None, None, device=CPU)

    assert check(RoutingMethodType.Renormalize) == (True, None)
    fits, reason = check(RoutingMethodType.Default)
    assert not fits
    assert reason == "does not compute the routing method Default"


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="backend 'plain'"):
        toy_oracle().add_backend(Backend("plain", (ToyExperts,), origin="other 1.0"))
