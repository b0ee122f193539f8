"""What warming up compiles is what calls launch, for every number of tokens, in every scheme's experts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import moe_core as mc
import pytest
import torch
from moe_core import FusedMoEKernel, FusedMoELayer
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.launch.compile_ahead import distinct
from moe_core.kernels.launch.launch import Launch, record
from moe_core.kernels.ops.routing import fused_route
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.runtime import compile_calls
from moe_core.runtime.call_launches import call_launches, launches_up_to, routing_launches
from moe_core_layers import some_kinds
from moe_core_meta_layers import SIZES, experts_cases, layer_of, on_h200

MOST = 9000


def kinds(launches: Iterator[Launch] | list[Launch]) -> frozenset[Any]:
    return frozenset(one.compiled_for() for one in launches)


@pytest.mark.parametrize(("experts", "lora"), experts_cases(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_no_call_launches_what_was_not_compiled(experts: type[GroupedExperts], lora: bool) -> None:
    kernel = on_h200(experts, layer_of(experts, is_lora_enabled=lora))
    compiled = kinds(launches_up_to(kernel, MOST))
    some = random.Random(experts.__name__).sample(range(4, MOST), 10)
    for tokens in (1, 2, 3, 8, 16, *some, MOST):
        missing = kinds(call_launches(kernel, tokens)) - compiled
        assert not missing, f"{tokens} tokens: {sorted(name for name, _ in missing)}"


class FromTwoRanks(PrepareAndFinalizeNoParallel):
    """Stands for prepare/finalize by which another rank's tokens come too."""

    collective = True

    def max_tokens(self, num_tokens: int) -> int:
        return 2 * num_tokens


def test_tokens_of_other_ranks_are_compiled_for_too() -> None:
    alone = on_h200(*experts_cases()[0][:1], layer_of(experts_cases()[0][0]))
    kernel = FusedMoEKernel(alone.experts, alone.weights, FromTwoRanks(alone.config))
    compiled = kinds(launches_up_to(kernel, 200))
    for tokens in (1, 7, 48, 199, 200, 201, 256, 399, 400):
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
        patch.object(compile_calls, "_compiles", lambda kernel: True),
        patch.object(compile_calls, "_call", lambda *_: None),
        patch.object(compile_calls, "compile_ahead", compile_ahead),
        patch.object(compile_calls, "current", lambda device: record()),
    ):
        count = mc.warm_up(layers, 64, progress=lambda *now: told.append(now))
    assert told == [(count, count)]
    assert count == len(kinds(compiled)) == len(kinds(routing_launches(layers[0], 64))) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", mc.registry().scheme_names())
def test_after_warming_up_no_call_compiles(scheme: str) -> None:
    from triton.runtime.jit import JITFunction

    kind = next(kind for kind in some_kinds() if kind.scheme == scheme)
    config = kind.config(**SIZES | {"num_experts": 8, "top_k": 2})
    compiled: list[str] = []
    start = JITFunction._do_compile

    def counted(self: JITFunction[Any], *arguments: Any, **named: Any) -> Any:
        compiled.append(self.fn.__name__)
        return start(self, *arguments, **named)

    for backend in ("triton", "marlin"):
        try:
            layer = FusedMoELayer.from_weights(scheme, config, kind.weights(config).to("cuda"), backend=backend)
        except mc.MoEError:
            continue
        with patch.object(JITFunction, "_do_compile", counted):
            assert layer.warm_up(500) > 10
            compiled.clear()
            for tokens in (*range(1, 33), 64, 100, 256, 500):
                x = torch.randn(tokens, config.hidden_size, device="cuda", dtype=config.dtype)
                logits = torch.randn(tokens, config.num_experts, device="cuda")
                layer(x, router_logits=logits)
                weights, ids = logits.softmax(-1).topk(config.top_k)
                layer(x, topk_weights=weights, topk_ids=ids)
        assert not compiled
        return
    pytest.fail(f"no kernel of core's serves {kind} here")
