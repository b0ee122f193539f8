"""What a call may be given, through the kernel, the layer and a compiled graph."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from moe_core import (
    DeviceInfo,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoELayer,
    LoRAWeights,
    RoutingConfig,
    TensorError,
    route,
)
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core_toys import MonolithicToyExperts, ToyExperts, toy_oracle, toy_weights
from torch import Tensor, nn

CONFIG = FusedMoEConfig(
    num_experts=6,
    top_k=2,
    hidden_size=16,
    intermediate_size=12,
    dtype=torch.float32,
    routing=RoutingConfig.from_method("Renormalize"),
)
NO_GRAD = r"requires grad.*torch\.no_grad\(\)"


def make_layer(config: FusedMoEConfig = CONFIG, **named: Any) -> FusedMoELayer:
    named.setdefault("router_weight", torch.randn(6, 16, generator=torch.Generator().manual_seed(3)))
    return FusedMoELayer.from_weights(toy_oracle(), config, toy_weights(config), **named)


def make_monolithic() -> FusedMoEKernel:
    experts = MonolithicToyExperts(CONFIG, weight_key=None, activation_key=None, device=DeviceInfo.parse("cpu"))
    return FusedMoEKernel(experts, experts.convert(toy_weights(CONFIG)), None)


def routing(tokens: int = 5) -> dict[str, Tensor]:
    logits = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(1))
    weights, ids = route(logits, top_k=2, config=RoutingConfig())
    return {"topk_weights": weights, "topk_ids": ids}


X = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
#: what has the elements of some tokens, and what has not
WRONG_WIDTHS = (X.T, X.reshape(10, 8), X[:4].reshape(2, 32), X[:, :15], X[None, :, :, None], torch.tensor(1.0))


@pytest.mark.parametrize("counts", [5, [], "5", ["5"], [5.0], [6, -1], [None]], ids=repr)
def test_tokens_per_rank_that_count_nothing_are_refused(counts: Any) -> None:
    layer = make_layer()
    for call in (layer, layer.start):
        with pytest.raises(TensorError, match="tokens_per_rank"):
            call(X, **routing(), tokens_per_rank=counts)


@pytest.mark.parametrize("x", WRONG_WIDTHS, ids=lambda x: str(list(x.shape)))
@pytest.mark.parametrize("how", ["router", "logits", "topk"])
def test_hidden_states_of_another_width_are_refused(x: Tensor, how: str) -> None:
    layer = make_layer()
    rows = x.numel() // 16
    given: dict[str, Any] = {"router": {}, "logits": {"router_logits": torch.zeros(rows, 6)}, "topk": routing(rows)}
    with pytest.raises(TensorError, match="hidden_states"):
        layer(x, **given[how])
    with pytest.raises(TensorError, match="K = 16"):
        layer.kernel.apply(x, **routing(rows))
    with pytest.raises(TensorError, match="K = 16"):
        make_monolithic().apply_monolithic(x, router_logits=torch.zeros(rows, 6))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_graph_refuses_another_width_too(fullgraph: bool) -> None:
    layer = make_layer()

    def through_layer(x: Tensor, logits: Tensor) -> Tensor:
        return layer(x * 1.0, router_logits=logits)

    def through_kernel(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return layer.kernel.apply(x * 1.0, topk_weights=weights, topk_ids=ids)

    for function, named in ((through_layer, [torch.zeros(10, 6)]), (through_kernel, routing(10).values())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules, which this imports
            torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=fullgraph, backend="aot_eager")
        with pytest.raises(TensorError, match="K = 16"):
            compiled(X.reshape(10, 8), *named)


@pytest.mark.parametrize("shape", [(16,), (5, 16), (1, 5, 16), (5, 1, 1, 16), (0, 16), (2, 0, 16)])
def test_any_leading_dimensions_are_tokens(shape: tuple[int, ...]) -> None:
    layer = make_layer()
    x = X[:1].view(16) if shape == (16,) else X[: int(np.prod(shape)) // 16].reshape(shape)
    assert torch.equal(layer(x), layer(x.reshape(-1, 16)).view(shape))


@pytest.mark.parametrize("name", ["hidden_states", "topk_weights", "router_logits", "output"])
def test_what_requires_grad_is_refused_in_grad_mode(name: str) -> None:
    layer = make_layer()
    given = {"hidden_states": X, **routing(), "output": torch.empty_like(X)}
    if name == "router_logits":
        given = {"hidden_states": X, "router_logits": torch.zeros(5, 6), "output": torch.empty_like(X)}
    given[name] = given[name].clone().requires_grad_()
    kernel = make_monolithic() if name == "router_logits" else layer.kernel
    call = kernel.apply_monolithic if name == "router_logits" else kernel.apply
    calls = [lambda: call(**given)]
    if name != "output":
        calls.append(lambda: layer(**{key: value for key, value in given.items() if key != "output"}))
    for one in calls:
        with pytest.raises(TensorError, match=f"{name} {NO_GRAD}"):
            one()
        with torch.no_grad():
            found = one()
        assert not found.requires_grad or name == "output"
    # computed from what requires grad
    given[name] = given[name] * 1.0
    with pytest.raises(TensorError, match=f"{name} {NO_GRAD}"):
        call(**given)
    with torch.inference_mode():
        call(**given)


@pytest.mark.parametrize("name", ["router_weight", "router_bias"])
def test_a_router_that_requires_grad_is_refused_in_grad_mode(name: str) -> None:
    given = {"router_weight": torch.randn(6, 16), "router_bias": torch.randn(6)}
    layer = make_layer(**given | {name: nn.Parameter(given[name])})
    with pytest.raises(TensorError, match=f"{name} {NO_GRAD}"):
        layer(X)
    with torch.no_grad():
        assert torch.equal(layer(X), make_layer(**given)(X))


def test_adapters_that_require_grad_are_refused_in_grad_mode() -> None:
    layer = make_layer()
    config = replace(CONFIG, is_lora_enabled=True)
    adapters = LoRAWeights.zeros(config, "cpu")
    layer.kernel._lora = replace(adapters, w2_a=adapters.w2_a.requires_grad_())
    with pytest.raises(TensorError, match=rf"lora\.w2_a {NO_GRAD}"):
        layer(X)


def test_a_compiled_graph_refuses_gradients_too() -> None:
    layer = make_layer()
    compiled = torch.compile(lambda x: layer(x), backend="aot_eager")
    with pytest.raises(TensorError, match=f"hidden_states {NO_GRAD}"):
        compiled(X.clone().requires_grad_())


def test_weights_that_are_parameters_are_used_without_gradients() -> None:
    weights = toy_weights(CONFIG)
    as_parameters = replace(weights, w13=nn.Parameter(weights.w13), w2=nn.Parameter(weights.w2))
    layer = FusedMoELayer.from_weights(toy_oracle(), CONFIG, as_parameters, copy=True)
    assert not any(tensor.requires_grad for _, tensor in layer.weights.tensors())
    found = layer(X, **routing())
    assert torch.equal(found, make_layer()(X, **routing()))
    assert not found.requires_grad
    layer.reload(as_parameters)
    assert not any(tensor.requires_grad for _, tensor in layer.weights.tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_router_weights_in_16_bits_are_widened(dtype: torch.dtype) -> None:
    given = routing()
    narrow = given["topk_weights"].to(dtype)
    expected = make_layer()(X, topk_weights=narrow.float(), topk_ids=given["topk_ids"])
    assert torch.equal(make_layer()(X, topk_weights=narrow, topk_ids=given["topk_ids"]), expected)


def test_an_empty_batch_may_have_any_strides() -> None:
    empty = torch.from_numpy(np.zeros((0, 16), dtype=np.float32))
    strided = torch.empty_strided((0, 16), (7, 3))
    given = routing(0)
    for x in (empty, empty.clone(), strided, torch.as_strided(X, (0, 16), (0, 0))):
        assert make_layer()(x).shape == (0, 16)
        assert make_layer().kernel.apply(x, **given, output=torch.empty(0, 16)).shape == (0, 16)

    class Exchange(PrepareAndFinalizeNoParallel):
        collective = True

    experts = ToyExperts(CONFIG, weight_key=None, activation_key=None, device=DeviceInfo.parse("cpu"))
    kernel = FusedMoEKernel(experts, experts.convert(toy_weights(CONFIG)), Exchange(CONFIG))
    assert kernel.apply(torch.as_strided(X, (0, 16), (0, 0)), **given).shape == (0, 16)


def test_the_output_has_memory_of_its_own() -> None:
    kernel = make_layer().kernel
    room = torch.zeros(12, 16)
    for x, output in ((room[:5], room[:5]), (room[:5], room[4:9]), (room[::2][:5], room[3:8])):
        with pytest.raises(TensorError, match="output .*hidden_states"):
            kernel.apply(x, **routing(), output=output)
    kernel.apply(room[:5], **routing(), output=room[5:10])


NOT_TENSORS = [None, [[0.0] * 16] * 5, np.zeros((5, 16), dtype=np.float32), 3, "x"]


@pytest.mark.parametrize("value", NOT_TENSORS, ids=lambda v: type(v).__name__)
def test_what_is_no_tensor_is_named(value: Any) -> None:
    layer = make_layer()
    for name in ("hidden_states", "topk_weights", "topk_ids", "expert_map", "adapter_ids", "output"):
        if value is None and name in ("expert_map", "adapter_ids", "output"):
            continue
        given = {"hidden_states": X, **routing(), name: value}
        layer.kernel._lora = LoRAWeights.zeros(CONFIG, "cpu") if name == "adapter_ids" else None
        with pytest.raises(TensorError, match=f"{name}"):
            layer.kernel.apply(**given)
    for name in ("router_weight", "router_bias", "correction_bias", "expert_map"):
        if value is not None:
            with pytest.raises(TensorError, match=f"{name}"):
                make_layer(**{name: value})
    with pytest.raises(TensorError, match="hidden_states"):
        layer(value)
    with pytest.raises(TensorError, match="router_logits"):
        make_monolithic().apply_monolithic(X, router_logits=value)


def test_sparse_hidden_states_are_refused() -> None:
    with pytest.raises(TensorError, match="hidden_states .*torch.sparse_coo"):
        make_layer()(X.to_sparse())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router_weight": torch.zeros(16, 6)}, r"router_weight .*\[16, 6\]"),
        ({"router_bias": torch.zeros(5)}, r"router_bias .*\[5\]"),
        ({"router_weight": torch.zeros(6, 16, dtype=torch.int32)}, "router_weight .*torch.int32"),
        ({"correction_bias": torch.zeros(6, device="meta")}, "correction_bias .*meta"),
        ({"expert_map": torch.arange(6)}, "expert_map .*torch.int64"),
    ],
)
def test_a_layer_checks_its_router_when_it_is_made(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        make_layer(**change)


def test_logits_of_another_batch_are_named() -> None:
    with pytest.raises(TensorError, match=r"router_logits .*\[4, 6\]"):
        make_layer()(X, router_logits=torch.zeros(4, 6))
