"""The conformance kit names the mistake: experts that make exactly one, written apart from the table of mistakes.

The other tests of faults say for each of theirs what it is called, and that it is called nothing where it is none of
the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from moe_core import (
    GATED,
    NON_GATED,
    Claims,
    FusedMoEConfig,
    FusedMoEQuantDesc,
    KernelWeights,
    MoEActivation,
    MoEWeights,
    QuantKey,
    RoutingMethodType,
    any_device,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt4Static,
    kInt4Static32,
    kInt4StaticAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.interface.experts import FusedMoEExperts
from moe_core.reference.torch_experts import TorchExperts
from moe_core.testing import Case, cases_for, run_case
from moe_core.testing.mistakes import CALL_MISTAKES, MATRIX_MISTAKES, MISTAKES
from moe_core_toys import PLAIN, MonolithicToyExperts
from torch import Tensor

TOKEN = (kFp8StaticChannelSym, kFp8DynamicTokenSym)
STATIC = (kFp8StaticTensorSym, kFp8StaticTensorSym)
PERMUTED = replace(kInt4Static32, permuted=True)
PRE_SCALED = replace(kInt4Static, pre_scaled=True)


def claims(*keys: Any, **changed: Any) -> Claims:
    base = Claims(
        devices=(any_device(),),
        keys=tuple(key if isinstance(key, tuple) else (key, None) for key in keys or (None,)),
        activations=frozenset({MoEActivation.SILU}),
        bias=True,
        cuda_graph=False,
    )
    return replace(base, **changed)


@dataclass(frozen=True)
class Toy:
    """A mistake, and experts that make it: in what they read, or in what a call gives them."""

    mistake: str
    claims: Claims
    read: Callable[[MoEWeights, FusedMoEConfig], dict[str, Any]] | None = None
    call: Callable[[dict[str, Any], FusedMoEConfig], dict[str, Any]] | None = None
    quantized: Callable[[TorchExperts, Tensor, FusedMoEQuantDesc], FusedMoEQuantDesc] | None = None

    def experts(self) -> type[TorchExperts]:
        toy = self

        class Mistaken(TorchExperts):
            claims = toy.claims

            def convert(self, weights: MoEWeights) -> KernelWeights:
                if toy.read is not None:
                    weights = replace(weights, **toy.read(weights, self.config))
                return super().convert(weights)

            def apply(self, *arguments: Any, **named: Any) -> None:
                if toy.call is not None:
                    named |= toy.call(named, self.config)
                super().apply(*arguments, **named)

            def quantized(self, x: Tensor, desc: FusedMoEQuantDesc, scale: Tensor | None = None) -> Tensor:
                if toy.quantized is not None:
                    desc = toy.quantized(self, x, desc)
                return super().quantized(x, desc, scale)

        return Mistaken


def reads(mistake: str, *keys: Any, **functions: Callable[[Tensor], Any]) -> Toy:
    """Experts that read tensors of the weights as ``functions`` of them."""

    def read(weights: MoEWeights, config: FusedMoEConfig) -> dict[str, Any]:
        given = {name: getattr(weights, name) for name in functions}
        return {name: functions[name](tensor) for name, tensor in given.items() if tensor is not None}

    return Toy(mistake, claims(*keys), read=read)


def asks(mistake: str, keys: tuple[QuantKey, QuantKey | None], other: QuantKey) -> Toy:
    """Experts that quantize activations by another key."""
    return Toy(mistake, claims(keys), read=lambda weights, config: {"activation_key": other})


def calls(mistake: str, name: str, function: Callable[[Any, FusedMoEConfig], Any], **changed: Any) -> Toy:
    """Experts that take an argument of the call as a ``function`` of it."""
    return Toy(
        mistake, claims(**changed), call=lambda n, c: {} if n.get(name) is None else {name: function(n[name], c)}
    )


def one_row_for_all(scale: Tensor) -> Tensor:
    return scale[:, :, :1].expand_as(scale).contiguous()


def swapped(tensor: Tensor) -> Tensor:
    first, second = tensor.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def half_groups(weights: MoEWeights, config: FusedMoEConfig) -> dict[str, Any]:
    """Reads scales by 16 columns where groups have 32, from the same memory."""
    assert weights.weight_key is not None
    found: dict[str, Any] = {"weight_key": weights.weight_key.with_group(1, 16)}
    for name, cols in (("w13_scale", config.hidden_size), ("w2_scale", config.intermediate_size)):
        scale: Tensor = getattr(weights, name)
        memory = torch.cat((scale.flatten(1), scale.flatten(1)), dim=1)
        rows = [memory[:, row * scale.shape[2] :][:, : -(-cols // 16)] for row in range(scale.shape[1])]
        found[name] = torch.stack(rows, dim=1).contiguous()
    return found


def inverse(expert_map: Tensor, config: FusedMoEConfig) -> Tensor:
    found = torch.full_like(expert_map, -1)
    for expert, local in enumerate(expert_map.tolist()):
        if 0 <= local < config.local_experts:
            found[local] = expert
    return found


TOYS = [
    calls("the router weight is left out", "topk_weights", lambda weights, config: torch.ones_like(weights)),
    calls("the router weights of a token's experts are in another order", "topk_weights", lambda w, c: w.flip(1)),
    calls("the expert map is read the other way round", "expert_map", inverse),
    calls("the expert map is off by one", "expert_map", lambda m, c: torch.where(m >= 0, m + 1, m)),
    reads(
        "each expert's weights are those of the next expert",
        w13=lambda w: w.roll(-1, 0),
        w2=lambda w: w.roll(-1, 0),
        w13_bias=lambda b: b.roll(-1, 0),
        w2_bias=lambda b: b.roll(-1, 0),
    ),
    reads(
        "each expert's weights are those of the expert before",
        w13=lambda w: w.roll(1, 0),
        w2=lambda w: w.roll(1, 0),
        w13_bias=lambda b: b.roll(1, 0),
        w2_bias=lambda b: b.roll(1, 0),
    ),
    reads(
        "every expert's weights are those of expert 0",
        w13=lambda w: w[:1].expand_as(w),
        w2=lambda w: w[:1].expand_as(w),
        w13_bias=lambda b: b[:1].expand_as(b),
        w2_bias=lambda b: b[:1].expand_as(b),
    ),
    reads(
        "the experts are in reverse order",
        w13=lambda w: w.flip(0),
        w2=lambda w: w.flip(0),
        w13_bias=lambda b: b.flip(0),
        w2_bias=lambda b: b.flip(0),
    ),
    Toy("adapters are left out", claims(lora=True), call=lambda named, config: {"lora": None}),
    reads("gate and up rows of w13 are swapped", w13=swapped, w13_bias=swapped),
    reads(
        "gate and up rows of w13 are swapped", kFp8Static128BlockSym, w13=swapped, w13_scale=swapped, w13_bias=swapped
    ),
    reads("the biases of gate and up are swapped", w13_bias=swapped),
    reads("the scales of gate and up are swapped", kFp8StaticChannelSym, w13_scale=swapped),
    reads("the biases of w13 are left out", w13_bias=torch.zeros_like),
    reads("the biases of w2 are applied twice", w2_bias=lambda b: b + b),
    reads("the biases of w13 are those of expert 0", w13_bias=lambda b: b[:1].expand_as(b)),
    Toy("the groups of the weights are half as large", claims(kInt4Static32), read=half_groups),
    reads(
        "the groups of w13 are twice as large",
        kInt4Static32,
        w13_scale=lambda s: s[:, :, torch.arange(s.shape[2]) // 2],
    ),
    reads("the first group of a row of w2 stands for the whole row", kInt4Static32, w2_scale=one_row_for_all),
    reads(
        "the memory of w2 is read as that of a transposed matrix",
        w2=lambda w: w.reshape(len(w), w.shape[2], w.shape[1]).mT,
    ),
    reads(
        "the memory of w13 and w2 is read as that of a transposed matrix",
        w13=lambda w: w.mT.reshape(w.shape),
        w2=lambda w: w.mT.reshape(w.shape),
    ),
    reads(
        "the memory of the scales of w2 is read as that of a transposed matrix",
        kInt4Static32,
        w2_scale=lambda s: s.mT.reshape(s.shape),
    ),
    reads("the scales of w13 are left out", kFp8StaticTensorSym, w13_scale=torch.ones_like),
    reads("the scales of w2 are left out", kInt8StaticChannelSym, w2_scale=torch.ones_like),
    reads("the scales of w2 are left out", kMxfp4Static, w2_scale=lambda s: torch.full_like(s, 127)),
    reads(
        "the scales of w13 and w2 are left out",
        kFp8Static128BlockSym,
        w13_scale=torch.ones_like,
        w2_scale=torch.ones_like,
    ),
    reads("the scales of w13 are applied twice", kFp8StaticChannelSym, w13_scale=lambda s: s * s),
    reads("the scales of w2 are divided by and not multiplied by", kFp8StaticTensorSym, w2_scale=lambda s: 1 / s),
    reads("the scales of w2 are twice as large", kMxfp4Static, w2_scale=lambda s: s + 1),
    reads("the zero points of w2 are left out", kInt4StaticAsym, w2_zero_point=torch.zeros_like),
    reads("the zero points of w13 are one too large", kInt4StaticAsym, w13_zero_point=lambda z: z + 1),
    reads("the zero points of w13 are those of expert 0", kInt4StaticAsym, w13_zero_point=lambda z: z[:1].expand_as(z)),
    reads("the zero points of w13 are those of another row", kInt4StaticAsym, w13_zero_point=lambda z: z.roll(1, 1)),
    reads(
        "the factors of the inputs of w2 are those of expert 0", PRE_SCALED, w2_pre_scale=lambda f: f[:1].expand_as(f)
    ),
    reads(
        "the columns' groups of w2 are ignored",
        PERMUTED,
        w2_g_idx=lambda g: (torch.arange(g.shape[1]) // 32).int().expand_as(g),
    ),
    reads("the input scales of w2 are left out", STATIC, w2_input_scale=torch.ones_like),
    Toy(
        "the activations' scales span the whole row",
        claims((kFp8Static128BlockSym, kFp8Dynamic128Sym)),
        quantized=lambda experts, x, desc: replace(desc, key=kFp8DynamicTokenSym),
    ),
    Toy(
        "the activations' scales span groups of 128",
        claims((kFp8StaticChannelSym, kFp8DynamicTokenSym)),
        quantized=lambda experts, x, desc: replace(desc, key=kFp8Dynamic128Sym),
    ),
    Toy(
        "the activations' scales are rounded 'down'",
        claims((kMxfp4Static, kMxfp8Dynamic)),
        quantized=lambda experts, x, desc: replace(desc, key=kMxfp8Dynamic.with_rounding("down")),
    ),
    asks("the activations' scales span the whole tensor", TOKEN, kFp8DynamicTensorSym),
    asks("the activations are quantized as kInt8DynamicTokenSym", TOKEN, kInt8DynamicTokenSym),
    asks("the activations are quantized as kFp8DynamicTokenSym", (kFp8StaticChannelSym, None), kFp8DynamicTokenSym),
    asks(
        "the activations' scales are rounded 'even'", (kMxfp4Static, kMxfp8Dynamic), kMxfp8Dynamic.with_rounding("even")
    ),
    asks(
        "the activations' scales are rounded 'up'", (kMxfp4Static, kMxfp8Dynamic.with_rounding("down")), kMxfp8Dynamic
    ),
    reads(
        "the input zero points of w13 are left out",
        (kInt8StaticChannelSym, kInt8StaticTensorAsym),
        w13_input_zero_point=torch.zeros_like,
    ),
]


def failing(experts: type[FusedMoEExperts], mistake: str, most: int = 12) -> list[str]:
    """What failing cases say, up to the first that names the mistake, or to so many."""
    found = []
    for case in cases_for(experts, device="cpu"):
        if case.check != "values":
            continue
        try:
            run_case(experts, case, device="cpu")
        except AssertionError as error:
            found.append(str(error))
            if mistake in found[-1] or len(found) == most:
                break
    return found


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.mistake)
def test_the_mistake_is_named(toy: Toy) -> None:
    found = failing(toy.experts(), toy.mistake)
    assert found, "no case fails"
    assert "; the output equals what results when " in found[-1], found[-1]
    assert toy.mistake in found[-1].partition("; the output equals what results when ")[2]


@pytest.mark.parametrize("activation", sorted(GATED | NON_GATED, key=lambda a: a.value))
def test_another_activation_is_named(activation: MoEActivation) -> None:
    asked = MoEActivation.GELU if activation.is_gated else MoEActivation.GELU_NO_MUL
    if activation is asked:
        asked = MoEActivation.SILU if activation.is_gated else MoEActivation.SILU_NO_MUL

    class Other(TorchExperts):
        claims = claims(activations=frozenset({asked}), activation_limit=False, dtypes=frozenset({torch.float32}))

        def first(self, x: Tensor, weights: KernelWeights, expert: int, added: Tensor | None = None) -> Tensor:
            config = self.config
            self.config = replace(config, activation=activation, activation_params=None)
            try:
                return super().first(x, weights, expert, added)
            finally:
                self.config = config

    assert f"the activation is {activation.value}" in failing(Other, f"the activation is {activation.value}")[-1]


@pytest.mark.parametrize(
    ("method", "changed", "mistake"),
    [
        (RoutingMethodType.Renormalize, {"scoring_func": "sigmoid"}, "the routing method is SigmoidRenorm"),
        (RoutingMethodType.DeepSeekV3, {"renormalize": False}, "the router weights are normalized, or are not"),
        (RoutingMethodType.DeepSeekV3, {"has_correction_bias": False}, "the routing's correction bias is left out"),
        (RoutingMethodType.Default, {"routed_scaling_factor": 1.0}, "the routing's scaling factor is left out"),
    ],
)
def test_another_routing_is_named(method: RoutingMethodType, changed: dict[str, Any], mistake: str) -> None:
    class Assumes(MonolithicToyExperts):
        claims = replace(PLAIN, routing_methods=frozenset({method}), activations=frozenset({MoEActivation.SILU}))

        def apply(self, *arguments: Any, correction_bias: Tensor | None = None, **named: Any) -> None:
            asked = self.config
            assert asked.routing is not None
            used = replace(asked.routing, score_selected_only=False, **changed)
            self.config = replace(asked, routing=used)
            bias = correction_bias if used.has_correction_bias else None
            super().apply(*arguments, correction_bias=bias, **named)
            self.config = asked

    assert mistake in failing(Assumes, mistake)[-1]


class Sums(TorchExperts):
    """Loses the last column of every sum: wrong, and none of the usual mistakes."""

    claims = claims(None, (kFp8StaticChannelSym, kFp8DynamicTokenSym), kInt4StaticAsym)

    def product(self, x: Tensor, weights: Tensor, desc: FusedMoEQuantDesc, expert: int, parts: int = 1) -> Tensor:
        x = x.clone()
        x[:, -1] = 0
        return super().product(x, weights, desc, expert, parts)


class Noise(TorchExperts):
    """Off by a few percent at random, the same each time."""

    claims = claims(None, (kFp8StaticChannelSym, kFp8DynamicTokenSym), kInt4StaticAsym)

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        output.mul_(1 + 0.05 * torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype))


class Halved(TorchExperts):
    claims = claims(None, (kFp8StaticChannelSym, kFp8DynamicTokenSym))

    def apply(self, output: Tensor, *arguments: Any, **named: Any) -> None:
        super().apply(output, *arguments, **named)
        output.mul_(0.9)


@pytest.mark.parametrize("experts", [Sums, Noise, Halved])
def test_another_error_is_named_nothing(experts: type[FusedMoEExperts]) -> None:
    found = failing(experts, "no case names this", most=5)
    assert len(found) == 5
    assert not [text for text in found if "the output equals" in text]


def test_a_failure_is_told_where_the_cause_can_t_be_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **named: Any) -> list[str]:
        raise RuntimeError("no memory")

    monkeypatch.setattr("moe_core.testing.mistakes.explanations", broken)
    text = failing(Noise, "", most=1)[-1]
    assert "the error's norm is" in text
    assert text.endswith("; looking for the cause failed: RuntimeError: no memory")


def test_no_mistake_replaces_another_one_of_the_same_name() -> None:
    assert len(MISTAKES) == len(CALL_MISTAKES) + len(MATRIX_MISTAKES)
    assert len(MATRIX_MISTAKES) > 100


def test_a_right_result_is_not_explained() -> None:
    case = Case("values", FusedMoEConfig(4, 2, 64, 48), None, None)
    run_case(Toy("", claims()).experts(), case, device="cpu")
