"""Random layers in every backend that runs without a GPU, against a model that shares no code with the packages.

The conformance kit makes its cases from the claims, and measures them against the packages' own reference.  Here layers
are drawn at random, codes and scales bit by bit, and the measure is :mod:`moe_core_intervals`.  ``--layers N`` draws N
for each class; a failure names its number.
"""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import moe_core_intervals as intervals
import numpy as np
import pytest
import torch
from moe_core import FusedMoEActivationFormat, FusedMoEConfig, FusedMoEKernel, MoEWeights, QuantKey, registry
from moe_core.interface.claims import expand_key
from moe_core.interface.effective import effective_input, effective_weights
from moe_core.interface.experts import FusedMoEExperts
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference.torch_experts import TorchExperts
from moe_core.spec.activation import ActivationParams
from moe_core.spec.environment import Environment
from moe_core.spec.numerics import NumberKind
from moe_core.spec.roles import scale_shape, storage_dtypes
from moe_core.testing.conformance import place_for
from moe_core.testing.harness import one_thread
from torch import Tensor


def reachable() -> list[tuple[str, type[FusedMoEExperts]]]:
    """(scheme, class) of every modular class that runs here, on the CPU or in Triton's interpreter."""
    environment = Environment.current()
    found = []
    for scheme in registry().scheme_names():
        for backend in registry().oracle(scheme).table():
            for experts in backend.load():
                claims = experts.claims
                if any(environment.reason_against(requirement) for requirement in claims.requires):
                    continue
                if not experts.is_monolithic and place_for(claims, "cpu") is not None:
                    found.append((scheme, experts))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" not in metafunc.fixturenames:
        return
    count = metafunc.config.getoption("--layers")
    rows = [(scheme, experts, number) for scheme, experts in reachable() for number in range(count)]
    ids = [f"{scheme}-{experts.__name__}-{number}" for scheme, experts, number in rows]
    metafunc.parametrize(("scheme", "experts", "number"), rows, ids=ids)


@dataclass
class Draw:
    """One random layer and its call."""

    config: FusedMoEConfig
    weights: MoEWeights
    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None

    @property
    def call(self) -> dict[str, Any]:
        return {"topk_weights": self.topk_weights, "topk_ids": self.topk_ids, "expert_map": self.expert_map}


def multiple(rng: random.Random, factor: int, most: int) -> int:
    return factor * rng.randint(1, max(1, most // factor))


def draw(experts: type[FusedMoEExperts], rng: random.Random) -> Draw | None:
    """A layer that the class accepts; None where the draw is not one."""
    claims = experts.claims
    place = place_for(claims, "cpu")
    assert place is not None
    weight_claim, activation_claim = rng.choice(claims.keys)
    weight_key, activation_key = rng.choice(expand_key(weight_claim)), rng.choice(expand_key(activation_claim))
    group = 1
    if claims.whole_groups and weight_key is not None and weight_key.group_size > 0:
        group = weight_key.group_size
    num_experts = rng.randint(2, 6)
    top_k = rng.randint(1, min(num_experts, 3))
    activation = rng.choice(sorted(claims.activations, key=lambda a: a.value))
    params = (
        ActivationParams(limit=rng.choice((0.5, 2.0))) if claims.limits(activation) and rng.random() < 0.5 else None
    )
    layout = rng.choice(sorted(claims.formats, key=lambda f: f.value))
    tokens = rng.randint(1, 5)
    config = FusedMoEConfig(
        num_experts=num_experts,
        num_local_experts=rng.randint(1, num_experts) if claims.expert_map else None,
        top_k=top_k,
        hidden_size=multiple(rng, math.lcm(claims.hidden_multiple, group), 160),
        intermediate_size=multiple(rng, math.lcm(claims.intermediate_multiple, group), 96),
        activation=activation,
        activation_params=params,
        dtype=rng.choice(sorted(claims.dtypes, key=str)),
        has_bias=claims.bias and rng.random() < 0.5,
        apply_router_weight_on_input=claims.apply_router_weight_on_input and top_k == 1 and rng.random() < 0.5,
        activation_format=layout,
        max_num_tokens=tokens * top_k if layout is FusedMoEActivationFormat.BATCHED else None,
    )
    fits, _ = experts.is_supported_config(
        config, weight_key, activation_key, device=place.target, environment=Environment.current()
    )
    if not fits:
        return None
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(tokens, config.hidden_size, generator=generator).to(config.dtype)
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k].to(torch.int32)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = rng.choice((-1, num_experts, 2**31 - 1))
    expert_map = None
    if config.local_experts < num_experts:
        expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
        chosen = torch.randperm(num_experts, generator=generator)[: config.local_experts]
        expert_map[chosen] = torch.arange(config.local_experts, dtype=torch.int32)
    topk_weights = torch.rand(ids.shape, generator=generator) + 0.1
    made = Draw(config, random_weights(config, weight_key, activation_key, generator), x, topk_weights, ids, expert_map)
    if activation_key is not None and activation_key.is_static:
        made.weights = with_input_scales(made, activation_key, generator)
    return made


def random_weights(
    config: FusedMoEConfig, key: QuantKey | None, activation_key: QuantKey | None, generator: torch.Generator
) -> MoEWeights:
    """Random codes, all of them; scales that make values of usual size, each its own."""
    found: dict[str, Any] = {}
    count, parts = config.local_experts, 2 if config.is_gated else 1
    for name, rows, cols, stacked in (
        ("w13", config.w13_rows, config.hidden_size, parts),
        ("w2", config.hidden_size, config.intermediate_size, 1),
    ):
        size = 1 / math.sqrt(cols)
        if config.has_bias:
            found[f"{name}_bias"] = torch.randn(count, rows, generator=generator).to(config.dtype)
        if key is None:
            found[name] = (size * torch.randn(count, rows, cols, generator=generator)).to(config.dtype)
            continue
        per_word = key.packing.values_per_word if key.packing is not None else 1
        codes = torch.randint(256, (count, rows, -(-cols // per_word)), generator=generator, dtype=torch.uint8)
        if key.dtype.name == "e4m3":
            codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        elif key.dtype.kind is NumberKind.INT and key.dtype.bits == 4:
            codes = ((codes & 15).to(torch.int8) - 8).view(torch.uint8)
        found[name] = codes.view(storage_dtypes(key)[0])
        # the root mean square of random codes is a fraction of the largest
        shape = scale_shape(key, count, rows, cols, stacked)
        scale = size / key.dtype.max_value * torch.exp2(3 * torch.rand(shape, generator=generator))
        if key.permuted:
            found[f"{name}_g_idx"] = torch.randint(shape[-1], (count, cols), generator=generator, dtype=torch.int32)
        if not key.symmetric:
            scale /= 4  # a code and its zero point may lie twice as far apart as codes from 0
            most = int(key.dtype.max_value) + 1
            found[f"{name}_zero_point"] = torch.randint(most + 1, shape, generator=generator, dtype=torch.int32)
        if key.pre_scaled:
            found[f"{name}_pre_scale"] = torch.exp2(2 * torch.rand(count, cols, generator=generator) - 1)
        if key.scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
            scale = (scale.log2().round() + 127).to(torch.uint8).view(key.scale.dtype)
        found[f"{name}_scale"] = (
            scale.to(key.scale.dtype) if scale.is_floating_point() and scale.element_size() > 1 else scale
        )
    return MoEWeights(weight_key=key, activation_key=activation_key, **found)


def with_input_scales(made: Draw, key: QuantKey, generator: torch.Generator) -> MoEWeights:
    """Static scales [E] near what the values need, so that a few saturate."""
    count = made.config.local_experts
    named: dict[str, Any] = {}
    for name, most in (("w13", 3.0), ("w2", 4.0)):
        named[f"{name}_input_scale"] = (0.5 + torch.rand(count, generator=generator)) * most / key.dtype.max_value
        if not key.symmetric:
            zero = torch.randint(-100, 100, (count,), generator=generator, dtype=torch.int32)
            named[f"{name}_input_zero_point"] = zero
    return replace(made.weights, **named)


def computed(experts: type[FusedMoEExperts], made: Draw, weights: MoEWeights) -> np.ndarray[Any, Any]:
    """The output of the class with ``weights`` in place of the layer's own."""
    place = place_for(experts.claims, "cpu")
    assert place is not None
    keys = {"weight_key": weights.weight_key, "activation_key": weights.activation_key}
    instance = experts(made.config, **keys, device=place.target)
    kernel = FusedMoEKernel(instance, instance.convert(weights), default_prepare_finalize(made.config))
    with one_thread(), torch.no_grad(), warnings.catch_warnings():
        # the interpreter's NumPy warns of what is well-defined on a GPU: an overflow to inf
        warnings.simplefilter("ignore", RuntimeWarning)
        return kernel.apply(made.x, **made.call).double().numpy()


def expected(experts: type[FusedMoEExperts], made: Draw) -> intervals.Ball:
    """What the class should compute, with what it says that it computes with."""
    place = place_for(experts.claims, "cpu")
    assert place is not None
    keys = {"weight_key": made.weights.weight_key, "activation_key": made.weights.activation_key}
    instance = experts(made.config, **keys, device=place.target)
    weights = effective_weights(instance, made.weights)
    return intervals.layer(effective_input(instance, made.x), weights, made.config, **made.call)


def drawn(experts: type[FusedMoEExperts], seed: str) -> Draw:
    rng = random.Random(seed)
    made = next((found for _ in range(200) if (found := draw(experts, rng)) is not None), None)
    assert made is not None, "no draw is accepted"
    made.weights.validate(made.config, values=True)
    return made


def test_a_random_layer_is_within_its_bound(scheme: str, experts: type[FusedMoEExperts], number: int) -> None:
    made = drawn(experts, f"{scheme} {experts.__name__} {number}")
    result, wanted = computed(experts, made, made.weights), expected(experts, made)
    error = np.abs(result - wanted.value)
    outside = ~(error <= wanted.radius)
    assert not outside.any(), (
        f"{int(outside.sum())} of {outside.size} elements are outside, by up to {(error / wanted.radius).max():.3g} "
        f"times the bound: {made.config}, {made.weights.weight_key} x {made.weights.activation_key}"
    )


@pytest.mark.parametrize(
    ("scheme", "experts"),
    [(scheme, experts) for scheme, experts in reachable() if issubclass(experts, TorchExperts)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_bound_finds_rows_of_another_place(scheme: str, experts: type[FusedMoEExperts]) -> None:
    """Worst cases must not add up to a bound that everything meets."""
    found = 0
    for number in range(10):
        made = drawn(experts, f"{scheme} {number}")
        codes = made.weights.w2
        raw = codes.view(torch.uint8) if codes.element_size() == 1 else codes
        wrong = replace(made.weights, w2=raw.roll(1, dims=1).view(codes.dtype))
        wanted = expected(experts, made)
        found += not (np.abs(computed(experts, made, wrong) - wanted.value) <= wanted.radius).all()
    assert found >= 5, f"{found} of 10 layers with w2's rows one further are outside their bounds"
