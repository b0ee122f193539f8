"""The suite of known faults finds each of them: a scheme of one class that has it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    Backend,
    Claims,
    FusedMoEExperts,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEWeights,
    Oracle,
    SchemeSpec,
    any_device,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from moe_core.reference.torch_experts import TorchExperts
from moe_kit import known_faults
from moe_kit.known_faults import KnownFaultTests
from torch import Tensor

TESTS = [name for name in vars(KnownFaultTests) if name.startswith("test_")]


class Sound(TorchExperts):
    interface_api = (1, 0)
    claims = Claims(
        devices=(any_device(),),
        keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),),
        activations=GATED | NON_GATED,
        bias=True,
        lora=True,
    )


class DropsBiases(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        return super().convert(replace(weights, w13_bias=None, w2_bias=None))


class TakesTheUsualLimit(Sound):
    def __init__(self, config: Any, **arguments: Any) -> None:
        super().__init__(replace(config, activation_params=None), **arguments)


class OneScaleColumn(Sound):
    """w13's groups are counted by the intermediate size."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        assert weights.w13_scale is not None
        scale, most = weights.w13_scale.clone(), -(-self.config.intermediate_size // 128)
        scale[:, :, most:] = scale[:, :, :1]
        return super().convert(replace(weights, w13_scale=scale))


class TakesHalves(Sound):
    """Rows of a layer without a gate are padded as two halves."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if not self.config.is_gated:
            half = weights.w13.shape[1] // 2
            weights = replace(weights, w13=weights.w13.view(torch.uint8).roll(half, 1).view(weights.w13.dtype))
        return super().convert(weights)


class GlobalNumbers(Sound):
    def convert(self, weights: MoEWeights) -> KernelWeights:
        assert weights.w13_scale is not None
        if self.config.local_experts < self.config.num_experts:
            weights = replace(weights, w13_scale=weights.w13_scale.roll(1, 0))
        return super().convert(weights)


class IgnoresAdapters(Sound):
    def apply(self, *arguments: Any, lora: Any = None, **named: Any) -> None:
        super().apply(*arguments, **named)


class SixteenBitActivations(Sound):
    def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
        return x.to(self.config.dtype).float()


class KeepsTheFirst(Sound):
    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        if not hasattr(self, "kept"):
            self.kept = weights.w13.clone()
        super().apply(output, hidden_states, replace(weights, w13=self.kept), **named)


FAULTS: dict[str, type[FusedMoEExperts]] = {
    "test_biases_reach_the_result": DropsBiases,
    "test_clamp_limits_reach_the_result": TakesTheUsualLimit,
    "test_w13_has_the_groups_of_the_hidden_size": OneScaleColumn,
    "test_layers_without_a_gate_in_sizes_that_need_padding": TakesHalves,
    "test_experts_of_this_rank_keep_what_is_theirs": GlobalNumbers,
    "test_adapters_that_are_claimed_are_applied": IgnoresAdapters,
    "test_activations_are_quantized_where_asked": SixteenBitActivations,
    "test_reloading_gives_the_new_layer_in_place": KeepsTheFirst,
}


class Suite(KnownFaultTests):
    scheme = "mine"
    keys = ((kFp8Static128BlockSym, kFp8Dynamic128Sym), (kFp8Static128BlockSym, None))


@pytest.fixture(autouse=True)
def on_the_cpu(no_gpu: None) -> None:
    pass


def outcomes(
    experts: type[FusedMoEExperts], tests: list[str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[bool]]:
    """Of each of the tests, whether each of its runs passes."""
    found = Oracle(SchemeSpec("mine", interface_api=(1, 0), format_api=(1, 0), backends=(Backend("mine", (experts,)),)))
    monkeypatch.setattr(known_faults, "registry", lambda: SimpleNamespace(oracle=lambda name: found))
    passed: dict[str, list[bool]] = {}
    for name in tests:
        runs: list[known_faults.Run] = []
        metafunc: Any = SimpleNamespace(
            fixturenames=["run"],
            function=getattr(KnownFaultTests, name),
            parametrize=lambda _, values, ids, runs=runs: runs.extend(values),
        )
        Suite.pytest_generate_tests(metafunc)
        for run in runs:
            try:
                getattr(Suite(), name)(run)
                passed.setdefault(name, []).append(True)
            except AssertionError:
                passed.setdefault(name, []).append(False)
    return passed


def test_what_is_sound_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(Sound, TESTS, monkeypatch)
    # one pair of keys is claimed, the other is left out
    assert found == {name: [True] * (2 if "without_a_gate" in name else 1) for name in TESTS}


def test_every_fault_has_a_class() -> None:
    assert sorted(FAULTS) == sorted(TESTS)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not all(outcomes(FAULTS[name], [name], monkeypatch)[name])
