"""What an engine sets up once for all layers: one workspace, kernels that are compiled before they are needed."""

from __future__ import annotations

import copy
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from moe_core import ConfigError, FusedMoEKernel, FusedMoELayer, LoRAWeights, shard_layer, share_workspace, warm_up
from moe_core.runtime import compile_calls
from moe_core.spec.config import FusedMoEParallelConfig
from moe_core_layers import Kind, some_kinds
from torch import nn


def kind() -> Kind:
    return some_kinds()[0]


def model() -> nn.Module:
    """Two layers that are alike, and one that is not."""
    return nn.Sequential(nn.Linear(4, 4), kind().layer(0), kind().layer(1), kind().layer(2, intermediate_size=256))


def kernels(layers: nn.Module) -> list[FusedMoEKernel]:
    return [layer.kernel for layer in layers.modules() if isinstance(layer, FusedMoELayer)]


def test_layers_share_one_workspace_of_the_largest() -> None:
    layers = model()
    before = [kernel.apply(**arguments(kernel, 3)) for kernel in kernels(layers)]
    with pytest.MonkeyPatch.context() as patched:
        # scratch memory of the CPU's backend is none: a size that every layer states
        sizes = {id(kernel): 1000 * (i + 1) for i, kernel in enumerate(kernels(layers))}
        patched.setattr(FusedMoEKernel, "workspace_nbytes", lambda self, tokens: sizes[id(self)] * tokens)
        workspace = share_workspace(layers, 16)
    assert workspace.nbytes == 16 * 3000
    assert all(kernel.workspace is workspace for kernel in kernels(layers))
    for kernel, expected in zip(kernels(layers), before, strict=True):
        assert torch.equal(kernel.apply(**arguments(kernel, 3)), expected)


@pytest.mark.parametrize("captured", [True, False])
def test_a_workspace_of_captured_graphs_outlives_the_next_one(captured: bool) -> None:
    layers = model()
    first = share_workspace(layers, 16)
    first.reserve(64)
    first._captured = captured  # what take() notes during a capture, which needs a GPU
    memory = weakref.ref(first.hold(0))
    del first
    second = share_workspace(layers, 32)
    assert all(kernel.workspace is second for kernel in kernels(layers))
    assert (memory() is not None) == captured
    # no copy's graphs use it
    copied = copy.deepcopy(kernels(layers)[0])
    assert copied._captured_workspaces == ()


def arguments(kernel: FusedMoEKernel, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, kernel.config.hidden_size, generator=generator).to(kernel.config.dtype)
    weights, ids = torch.rand(tokens, kernel.config.num_experts, generator=generator).topk(kernel.config.top_k)
    return {"hidden_states": x, "topk_weights": weights, "topk_ids": ids}


def called(layers: object, most: int) -> list[tuple[int, int, bool]]:
    """(intermediate size, tokens, adapters) of each call that warming up makes of experts that are a library's."""
    calls = []
    apply = FusedMoEKernel.apply

    def noted(self: FusedMoEKernel, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        adapters = given.get("adapter_ids") is not None
        calls.append((self.config.intermediate_size, hidden_states.shape[0], adapters))
        return apply(self, hidden_states, **given)

    with patch.object(FusedMoEKernel, "apply", noted), patch.object(compile_calls, "_compiles", lambda kernel: True):
        # the routing of a layer is not looked at here
        with patch.object(compile_calls, "routing_launches", lambda layer, most: []):
            assert warm_up(layers, most) == 0  # type: ignore[arg-type]
    return calls


def test_one_of_the_layers_that_are_alike_is_called() -> None:
    assert called(model(), 5) == [(size, tokens, False) for size in (128, 256) for tokens in (1, 2, 4, 5)]
    assert called(kernels(model())[2], 1) == [(256, 1, False)]
    assert called(iter(kernels(model())[:2]), 2) == [(128, 1, False), (128, 2, False)]


def test_nothing_is_called_on_a_cpu() -> None:
    with patch.object(FusedMoEKernel, "apply", lambda *_, **__: pytest.fail("a call")):
        assert warm_up(model(), 5) == 0


def test_layers_of_a_rank_and_with_adapters_are_called_as_they_will_be() -> None:
    layer = kind().layer(is_lora_enabled=True, max_loras=2)
    assert isinstance(layer.lora, LoRAWeights)
    assert called([layer], 1) == [(128, 1, False), (128, 1, True)]
    whole = kind().config()
    shard = shard_layer(whole, kind().weights(whole), FusedMoEParallelConfig(ep_size=2, ep_rank=1))
    layer = FusedMoELayer.from_weights(kind().scheme, shard.config, shard.weights)
    assert called([layer.kernel], 1) == [(128, 1, False)]


@pytest.mark.parametrize("function", [lambda layers: share_workspace(layers, 4), lambda layers: warm_up(layers, 4)])
def test_what_holds_no_layer_is_refused(function: object) -> None:
    for nothing in (nn.Linear(2, 2), []):
        with pytest.raises(ConfigError, match="FusedMoELayer"):
            function(nothing)  # type: ignore[operator]
    with pytest.raises(ConfigError, match="layers .*Linear"):
        function([nn.Linear(2, 2)])  # type: ignore[operator]
    with pytest.raises(ConfigError, match="positive"):
        share_workspace(model(), 0)
    with pytest.raises(ConfigError, match="positive"):
        warm_up(model(), 0)
