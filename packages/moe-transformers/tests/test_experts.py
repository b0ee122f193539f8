"""The module in a block's place for its experts."""

from __future__ import annotations

from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.testing.conformance import place_for
from moe_core_replays import as_if_compiled, python_calls
from moe_transformers import MoeCoreExperts
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

E, TOP_K, K, N, TOKENS = 4, 2, 256, 128, 6


CONFIG = mc.FusedMoEConfig(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N)


@pytest.fixture(scope="module")
def weights() -> mc.MoEWeights:
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(E, *shape, generator=generator) / 16 for shape in ((2 * N, K), (K, N)))
    return mc.quantize_moe_weights(w13, w2, gated=True, weight_key=mc.kFp8Static128BlockSym)


@pytest.fixture(scope="module")
def layer(weights: mc.MoEWeights) -> mc.FusedMoELayer:
    return mc.FusedMoELayer.from_weights("fp8", CONFIG, weights, copy=True)


@pytest.fixture
def call() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights as transformers' routers make them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, K, generator=generator).bfloat16()
    weights, ids = torch.rand(TOKENS, E, generator=generator).topk(TOP_K)
    return x, ids, weights.bfloat16()


def test_is_the_layer_with_the_blocks_routing(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    expected = layer(x, topk_weights=weights.float(), topk_ids=ids)
    assert expected.abs().max() > 0
    assert torch.equal(MoeCoreExperts(layer)(x, ids, weights), expected)


class Operators(TorchDispatchMode):
    """Names of the operators that torch runs within it, without views, which start nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_starts_nothing_that_the_layer_does_not(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    with Operators() as own:
        MoeCoreExperts(layer)(x, ids, weights)
    with Operators() as expected:
        layer(x, topk_weights=weights, topk_ids=ids)
    assert own.names == expected.names


def test_makes_nothing_but_the_output_and_float32_weights(
    layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view costs as much as the check of all arguments."""

    class All(Operators):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(mc.FusedMoEKernel, "_run", lambda *_, **__: None)
    with All() as own:
        MoeCoreExperts(layer)(*call)
    assert own.names == ["aten.empty_like.default", "aten._to_copy.default"]


def test_calls_that_repeat_are_replayed(
    weights: mc.MoEWeights,
    layer: mc.FusedMoELayer,
    call: tuple[Tensor, Tensor, Tensor],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With routing as transformers gives it, the module adds to the layer's calls what costs microseconds."""
    if device.type == "cpu":
        as_if_compiled(monkeypatch)
    (triton,) = [backend for backend in mc.registry().oracle("fp8").table() if backend.name == "triton"]
    kind = triton.load()[0]
    place = place_for(kind.claims, device.type)
    assert place is not None
    keys = {"weight_key": weights.weight_key, "activation_key": weights.activation_key}
    instance = kind(CONFIG, **keys, device=place.target)
    kernel = mc.FusedMoEKernel(instance, instance.convert(weights.to(device)), default_prepare_finalize(CONFIG))
    kernel.workspace = mc.Workspace(device)
    module = MoeCoreExperts(mc.FusedMoELayer(kernel, layer.selection))
    x, ids, top = (tensor.to(device) for tensor in call)
    for _ in range(2):
        module(x.clone(), ids.clone(), top.clone())
    assert kernel._replay.reasons() == (None,)
    monkeypatch.setattr(GroupedExperts, "apply", lambda *_, **__: pytest.fail("dispatched again"))
    of_layer = python_calls(lambda: module.layer(x, topk_weights=top, topk_ids=ids))
    of_module = python_calls(lambda: module(x, ids, top))
    # some sixty, and those of Triton's launcher
    assert of_layer < 120
    # nn.Module's own among them
    assert of_module - of_layer < 10


def test_leading_dimensions_stay(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    experts = MoeCoreExperts(layer)
    output = experts(*(tensor.reshape(2, TOKENS // 2, -1) for tensor in call))
    assert torch.equal(output.reshape(TOKENS, K), experts(*call))


def test_ids_of_no_expert_select_nothing(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    assert not MoeCoreExperts(layer)(x, torch.full_like(ids, E), weights).any()


def test_gradients_are_refused(layer: mc.FusedMoELayer, call: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ids, weights = call
    with pytest.raises(mc.TensorError, match="hidden_states"):
        MoeCoreExperts(layer)(x.requires_grad_(), ids, weights)


def test_state_dict_leaves_experts_out(layer: mc.FusedMoELayer) -> None:
    with pytest.warns(mc.ExpertsLeftOutWarning):
        assert not MoeCoreExperts(layer).state_dict()
