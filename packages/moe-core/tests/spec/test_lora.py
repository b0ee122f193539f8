"""LoRA adapters: their places, the call, and what the conformance kit finds wrong about them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    ConfigError,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEKernel,
    LoRA,
    LoRAWeights,
    MoEActivation,
    MoEWeights,
    TensorError,
    any_device,
    fused_moe_reference,
    kFp8DynamicTensorSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.reference.torch_experts import TorchExperts
from moe_core.testing import ConformanceTests, cases_for
from moe_core.testing.data import make_inputs, make_lora, make_weights
from moe_core_failures import check_found
from moe_core_toys import ToyExperts
from torch import Tensor

CONFIG = FusedMoEConfig(
    num_experts=4,
    top_k=2,
    hidden_size=24,
    intermediate_size=20,
    dtype=torch.float32,
    is_lora_enabled=True,
    max_loras=3,
    max_lora_rank=5,
)


class Sound(TorchExperts):
    interface_api = (1, 0)
    claims = Claims(
        devices=(any_device(),),
        keys=(
            (None, None),
            (kInt8StaticChannelSym, kInt8DynamicTokenSym),
            (kFp8StaticTensorSym, kFp8StaticTensorSym),
            (kFp8StaticTensorSym, kFp8DynamicTensorSym),
        ),
        activations=GATED | NON_GATED,
        bias=True,
        apply_router_weight_on_input=True,
        formats=frozenset(FusedMoEActivationFormat),
        lora=True,
        cuda_graph=False,
    )


class TestSound(ConformanceTests):
    experts = Sound
    device = "cpu"


def test_cases_with_and_without_adapters_of_each_format() -> None:
    found = {(case.config.activation_format, case.config.is_lora_enabled) for case in cases_for(Sound, device="cpu")}
    assert found == {(layout, lora) for layout in FusedMoEActivationFormat for lora in (False, True)}


class NoAdapters(Sound):
    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        super().apply(*arguments, **named)


class OnlyFirst(Sound):
    """Adapters for w13, none for w2."""

    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None:
            lora = replace(lora, weights=replace(lora.weights, w2_b=torch.zeros_like(lora.weights.w2_b)))
        super().apply(*arguments, lora=lora, **named)


class GateForBoth(Sound):
    """Both halves read the gate's A."""

    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None and self.config.is_gated:
            first = lora.weights.w13_a[:, :, : lora.weights.rank]
            lora = replace(lora, weights=replace(lora.weights, w13_a=torch.cat([first, first], 2)))
        super().apply(*arguments, lora=lora, **named)


class ZeroForNone(Sound):
    """A token without an adapter gets adapter 0."""

    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None:
            lora = replace(lora, adapter_ids=lora.adapter_ids.clamp_min(0))
        super().apply(*arguments, lora=lora, **named)


class LastForTooLarge(Sound):
    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None:
            lora = replace(lora, adapter_ids=lora.adapter_ids.clamp_max(lora.weights.num_adapters - 1))
        super().apply(*arguments, lora=lora, **named)


class ExpertZeros(Sound):
    """Every expert's rows meet expert 0's adapters."""

    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None:
            same = {name: tensor[:, :1].expand_as(tensor) for name, tensor in lora.weights.tensors()}
            lora = replace(lora, weights=LoRAWeights(**same))
        super().apply(*arguments, lora=lora, **named)


class OfTheFirstToken(Sound):
    def apply(self, *arguments: Any, lora: LoRA | None = None, **named: Any) -> None:
        if lora is not None and lora.adapter_ids.numel():
            lora = replace(lora, adapter_ids=lora.adapter_ids.flatten()[:1].expand_as(lora.adapter_ids))
        super().apply(*arguments, lora=lora, **named)


@pytest.mark.parametrize(
    "faulty", [NoAdapters, OnlyFirst, GateForBoth, ZeroForNone, LastForTooLarge, ExpertZeros, OfTheFirstToken]
)
def test_faults_are_found(faulty: type[Sound]) -> None:
    check_found(faulty, "the error's norm is", "adapters are left out" if faulty is NoAdapters else None)


def layer(config: FusedMoEConfig = CONFIG) -> tuple[FusedMoEKernel, MoEWeights]:
    weights = make_weights(config, None, None, seed=1)
    experts = Sound(config, weight_key=None, activation_key=None)
    return FusedMoEKernel(experts, experts.convert(weights), default_prepare_finalize(config)), weights


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.RELU2_NO_MUL])
@pytest.mark.parametrize("layout", list(FusedMoEActivationFormat))
def test_an_adapter_is_a_change_of_the_weights(activation: MoEActivation, layout: FusedMoEActivationFormat) -> None:
    config = replace(CONFIG, activation=activation, activation_format=layout)
    kernel, weights = layer(config)
    kernel.lora = lora = make_lora(config, seed=2)
    inputs = make_inputs(config, 6, seed=3)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    for adapter in range(4):
        ids = torch.full((6,), adapter, dtype=torch.int32)
        changed = weights
        if adapter < 3:
            parts = 2 if config.is_gated else 1
            low, high = (t[adapter].unflatten(1, (parts, -1)) for t in (lora.w13_a, lora.w13_b))
            w13 = weights.w13 + (high @ low).flatten(1, 2)
            changed = replace(weights, w13=w13, w2=weights.w2 + lora.w2_b[adapter] @ lora.w2_a[adapter])
        expected = fused_moe_reference(inputs.x, changed, config, **routed)
        found = kernel.apply(inputs.x, **routed, adapter_ids=ids)
        # three products of at most 24 terms in float32, of values about 1
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
        exact = fused_moe_reference(inputs.x, weights, config, **routed, lora=LoRA(lora, ids))
        torch.testing.assert_close(exact, expected, rtol=1e-6, atol=1e-5)  # of the changed weights in float32


def adapter(rank: int, config: FusedMoEConfig = CONFIG) -> dict[str, Tensor]:
    one = make_lora(replace(config, max_loras=1, max_lora_rank=rank), seed=rank)
    return {name: tensor[0] for name, tensor in one.tensors()}


def test_an_adapter_of_smaller_rank_takes_its_place() -> None:
    kernel, _ = layer()
    inputs = make_inputs(CONFIG, 6, seed=3)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    small = replace(CONFIG, max_loras=1, max_lora_rank=2)
    narrow, _ = layer(small)
    narrow.lora = LoRAWeights(**{name: tensor[None].clone() for name, tensor in adapter(2).items()})
    narrow.lora.w13_b.mul_(0.5)
    narrow.lora.w2_b.mul_(0.5)
    expected = narrow.apply(inputs.x, **routed, adapter_ids=torch.zeros(6, dtype=torch.int32))

    kernel.lora = LoRAWeights.zeros(CONFIG, "cpu")
    plain = kernel.apply(inputs.x, **routed)
    ones = torch.ones(6, dtype=torch.int32)
    pointers = [tensor.data_ptr() for _, tensor in kernel.lora.tensors()]
    kernel.lora.load(1, **adapter(5))
    kernel.lora.load(1, **adapter(2), scaling=0.5)
    assert [tensor.data_ptr() for _, tensor in kernel.lora.tensors()] == pointers
    torch.testing.assert_close(kernel.apply(inputs.x, **routed, adapter_ids=ones), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(kernel.apply(inputs.x, **routed, adapter_ids=ones * 2), plain)
    kernel.lora.clear(1)
    assert torch.equal(kernel.apply(inputs.x, **routed, adapter_ids=ones), plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"w2_a": torch.zeros(4, 6, 20)},
            r"w2_a .*\[4, 6, 20\]",
        ),
        ({"w2_a": torch.zeros(20)}, r"w2_a has shape \[20\]"),
        ({"w13_a": torch.zeros(4, 2, 24)}, r"w13_a .*\[4, 2, 24\]"),
        ({"w13_b": torch.zeros(4, 20, 2)}, r"w13_b .*\[4, 20, 2\]"),
        ({"w2_b": torch.zeros(3, 24, 2)}, r"w2_b .*\[3, 24, 2\]"),
        ({"w2_b": torch.zeros(4, 24, 2, dtype=torch.int8)}, "w2_b .*torch.int8"),
    ],
)
def test_an_adapter_that_does_not_fit_leaves_its_place_alone(change: dict[str, Tensor], message: str) -> None:
    places = make_lora(CONFIG, seed=4)
    before = {name: tensor.clone() for name, tensor in places.tensors()}
    with pytest.raises(TensorError, match=message):
        places.load(0, **{**adapter(2), **change})
    assert all(torch.equal(tensor, before[name]) for name, tensor in places.tensors())


def test_there_are_so_many_places() -> None:
    places = LoRAWeights.zeros(CONFIG, "cpu")
    for wrong in (-1, 3):
        with pytest.raises(TensorError, match=f"adapter {wrong} "):
            places.clear(wrong)


def test_adapters_must_fit_the_layer() -> None:
    kernel, _ = layer()
    places = LoRAWeights.zeros(CONFIG, "cpu")
    with pytest.raises(TensorError, match=r"w2_b .*\[3, 4, 24, 6\]"):
        kernel.lora = replace(places, w2_b=torch.zeros(3, 4, 24, 6))
    with pytest.raises(TensorError, match="w13_a .*torch.bfloat16"):
        kernel.lora = replace(places, w13_a=places.w13_a.bfloat16())
    with pytest.raises(TensorError, match="w2_a"):
        kernel.lora = replace(places, w2_a=places.w2_a.transpose(0, 1).contiguous().transpose(0, 1))
    assert kernel.lora is None
    without, _ = layer(replace(CONFIG, is_lora_enabled=False))
    with pytest.raises(ConfigError, match="is_lora_enabled=False"):
        without.lora = places


def test_adapter_numbers_are_checked() -> None:
    kernel, _ = layer()
    inputs = make_inputs(CONFIG, 6, seed=3)
    ids = inputs.adapter_ids
    assert ids is not None
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    with pytest.raises(ConfigError, match="adapter"):
        kernel.apply(inputs.x, **routed, adapter_ids=ids)
    kernel.lora = LoRAWeights.zeros(CONFIG, "cpu")
    with pytest.raises(TensorError, match=r"adapter_ids .*\[5\]"):
        kernel.apply(inputs.x, **routed, adapter_ids=ids[:5])
    with pytest.raises(TensorError, match="adapter_ids .*torch.int64"):
        kernel.apply(inputs.x, **routed, adapter_ids=ids.long())


def test_experts_without_the_claim_refuse_the_layer() -> None:
    supported, reason = ToyExperts.is_supported_config(CONFIG, None, None)
    assert not supported
    assert reason is not None
    assert "does not apply LoRA adapters" in reason


class Deaf(PrepareAndFinalizeNoParallel):
    lora = False


def test_a_prepare_that_leaves_the_numbers_behind_is_refused() -> None:
    experts = Sound(CONFIG, weight_key=None, activation_key=None)
    with pytest.raises(ConfigError, match="Deaf"):
        FusedMoEKernel(experts, experts.convert(make_weights(CONFIG, None, None, seed=1)), Deaf(CONFIG))


@pytest.mark.parametrize(("name", "value"), [("max_loras", 0), ("max_lora_rank", -1)])
def test_places_are_counted(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}"):
        replace(CONFIG, **{name: value})
