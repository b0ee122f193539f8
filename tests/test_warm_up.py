"""What warming up compiles is what calls launch, for every number of tokens, in every scheme's experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import moe_core as mc
import pytest
import torch
from moe_core import FusedMoEKernel, FusedMoELayer, LoRAWeights, model_setup
from moe_core.call_launches import call_launches, launches_up_to, routing_launches
from moe_core.device import DeviceInfo
from moe_core.environment import Environment
from moe_core.gemm.experts import GroupedExperts
from moe_core.jit.compile_ahead import distinct
from moe_core.jit.launch import Launch, record
from moe_core.ops.routing import fused_route
from moe_core.oracle import default_prepare_finalize
from moe_core.testing.compile_cases import key_pairs, meta_layer_weights
from moe_core_layers import some_kinds

H200 = DeviceInfo.parse("h200")
SIZES: dict[str, Any] = {"num_experts": 32, "top_k": 6, "hidden_size": 2048, "intermediate_size": 768}
MOST = 9000


def grouped_experts() -> Iterator[type[GroupedExperts]]:
    seen = set()
    for oracle in mc.registry().oracles():
        for backend in oracle.table():
            for experts in backend.load():
                if issubclass(experts, GroupedExperts) and experts not in seen:
                    seen.add(experts)
                    yield experts


def layer_of(experts: type[GroupedExperts], **changes: Any) -> mc.FusedMoEConfig:
    layout = min(experts.claims.formats, key=lambda item: item != "standard")
    return mc.FusedMoEConfig(**SIZES | {"activation_format": layout} | changes)


def keys_on_h200(experts: type[GroupedExperts], config: mc.FusedMoEConfig) -> list[tuple[Any, Any]]:
    """The claimed keys that fit."""
    found = key_pairs(experts)
    return [keys for keys in found if not experts.unsupported_reasons(config, *keys, H200, Environment.current())]


def on_h200(experts: type[GroupedExperts], config: mc.FusedMoEConfig) -> FusedMoEKernel:
    """A layer of meta tensors."""
    weight_key, activation_key = keys_on_h200(experts, config)[0]
    made = experts(config, weight_key=weight_key, activation_key=activation_key, device=H200)
    lora = LoRAWeights.zeros(config, "meta") if config.is_lora_enabled else None
    return FusedMoEKernel(made, meta_layer_weights(made), default_prepare_finalize(config), lora=lora)


def cases() -> list[tuple[type[GroupedExperts], bool]]:
    """Experts, each alone, and every third that takes adapters with them."""
    found = [experts for experts in grouped_experts() if keys_on_h200(experts, layer_of(experts))]
    adapted = [experts for experts in found if keys_on_h200(experts, layer_of(experts, is_lora_enabled=True))]
    return [*((experts, False) for experts in found), *((experts, True) for experts in adapted[::3])]


def kinds(launches: Iterator[Launch] | list[Launch]) -> frozenset[Any]:
    return frozenset(one.compiled_for() for one in launches)


@pytest.mark.parametrize(("experts", "lora"), cases(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_call_launches_what_was_not_compiled(experts: type[GroupedExperts], lora: bool) -> None:
    kernel = on_h200(experts, layer_of(experts, is_lora_enabled=lora))
    compiled = kinds(launches_up_to(kernel, MOST))
    some = random.Random(experts.__name__).sample(range(4, MOST), 10)
    for tokens in (1, 2, 3, 8, 16, *some, MOST):
        missing = kinds(call_launches(kernel, tokens)) - compiled
        assert not missing, f"{tokens} tokens: {sorted(name for name, _ in missing)}"


def test_routing_is_compiled_too() -> None:
    layer = some_kinds()[0].layer()
    compiled = kinds(routing_launches(layer, 6000))
    assert layer.routing is not None
    for tokens in (1, 2, 3, 16, 48, 4096, 4097, 5999, 6000):
        with record() as launches:
            fused_route(torch.empty(tokens, 6, device="meta"), top_k=2, config=layer.routing)
        assert kinds(launches) <= compiled


def test_layers_that_are_alike_are_compiled_once_and_progress_is_told() -> None:
    layers = [some_kinds()[0].layer(seed) for seed in range(2)]
    told: list[tuple[int, int]] = []
    compiled: list[Launch] = []

    def compile_ahead(launches: list[Launch], *, progress: Any) -> int:
        compiled.extend(distinct(launches))
        progress(len(compiled), len(compiled))
        return len(compiled)

    with (
        patch.object(model_setup, "_compiles", lambda kernel: True),
        patch.object(model_setup, "_call", lambda *_: None),
        patch.object(model_setup, "compile_ahead", compile_ahead),
        patch.object(model_setup, "on_device", lambda device: record()),
    ):
        count = mc.warm_up(layers, 64, progress=lambda *now: told.append(now))
    assert told == [(count, count)]
    assert count == len(kinds(compiled)) == len(kinds(routing_launches(layers[0], 64))) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", mc.registry().scheme_names())
def test_after_warming_up_no_call_compiles(scheme: str) -> None:
    from triton import knobs

    oracle = mc.registry().oracle(scheme)
    kind = next(kind for kind in some_kinds() if kind.scheme == scheme)
    config = kind.config(**SIZES | {"num_experts": 8, "top_k": 2})
    for backend in ("triton", "marlin"):
        if backend not in [item.name for item in oracle.table()]:
            continue
        try:
            selection = oracle.select(
                config, weight_key=kind.weight_key, activation_key=kind.activation_key, moe_backend=backend
            )
        except mc.MoEError:
            continue
        layer = FusedMoELayer.from_weights(scheme, config, kind.weights(config).to("cuda"), moe_backend=backend)
        assert layer.selection.backend == selection.backend
        compiled: list[str] = []
        before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = lambda **said: compiled.append(said["repr"])  # noqa: B023
        try:
            assert layer.warm_up(3000) > 10
            compiled.clear()
            for tokens in (*range(1, 33), 64, 100, 256, 511, 1024, 2000, 3000):
                x = torch.randn(tokens, config.hidden_size, device="cuda", dtype=config.dtype)
                logits = torch.randn(tokens, config.num_experts, device="cuda")
                layer(x, router_logits=logits)
                weights, ids = logits.softmax(-1).topk(config.top_k)
                layer(x, topk_weights=weights, topk_ids=ids)
        finally:
            knobs.runtime.jit_post_compile_hook = before
        assert not compiled
