"""A layer from a folder: what is read arrives where it is used."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    CheckpointError,
    ConfigError,
    MoEActivation,
    RoutingConfig,
    SelectionError,
    TensorError,
    load_layer,
    route,
)
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.errors import CheckpointWarning
from moe_core.selection.registry import registry
from moe_core_checkpoints import E, K, N, PlainLayout, entry_points, expert_tensors, layer_tensors, write
from torch import Tensor


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scheme ``plain`` and no other."""
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, K, generator=torch.Generator().manual_seed(3))


def test_routes_by_the_checkpoints_router(tmp_path: Path, x: Tensor) -> None:
    tensors = layer_tensors()
    layer = load_layer(write(tmp_path, tensors), device="cpu", dtype=torch.float32)
    logits = x @ tensors["model.layers.0.mlp.gate.weight"].float().T
    assert torch.allclose(layer.router_logits(x), logits)
    weights, ids = layer.route(logits)
    by_itself = layer(x)
    assert torch.equal(by_itself, layer(x, router_logits=logits))
    assert torch.equal(by_itself, layer(x, topk_weights=weights, topk_ids=ids))
    assert torch.equal(layer(x.view(2, 3, K)), by_itself.view(2, 3, K))


@pytest.mark.parametrize("dtype", [torch.int8, "int8", torch.float64, 3])
def test_a_dtype_that_is_none_of_hidden_states(tmp_path: Path, dtype: Any) -> None:
    """The argument is at fault, not config.json."""
    folder = write(tmp_path, layer_tensors())
    with pytest.raises(ConfigError, match=rf"^dtype .*{re.escape(repr(dtype))}$"):
        load_layer(folder, device="cpu", dtype=dtype)


def test_router_bias(tmp_path: Path, x: Tensor) -> None:
    bias = torch.tensor([0.0, 5.0, -5.0, 1.0])
    tensors = {**layer_tensors(), "model.layers.0.mlp.gate.bias": bias}
    layer = load_layer(write(tmp_path, tensors), device="cpu", dtype=torch.float32, routing="softmax,renormalize")
    assert torch.allclose(layer.router_logits(x), x @ tensors["model.layers.0.mlp.gate.weight"].float().T + bias)


def test_correction_bias(tmp_path: Path, x: Tensor) -> None:
    bias = torch.tensor([0.0, 1.0, -1.0, 0.5])
    tensors = {**layer_tensors(), "model.layers.0.mlp.gate.e_score_correction_bias": bias}
    folder = write(tmp_path, tensors, model_type="deepseek_v3", n_group=1, topk_group=1)
    layer = load_layer(folder, device="cpu", dtype=torch.float32)
    assert layer.routing is not None
    logits = layer.router_logits(x)
    weights, ids = route(logits, top_k=2, config=layer.routing, correction_bias=bias)
    assert torch.equal(layer(x), layer(x, topk_weights=weights, topk_ids=ids))


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[3, 0], [1], [2]]])
def test_expert_parallel_parts_add_up(tmp_path: Path, x: Tensor, parts: list[list[int]]) -> None:
    folder = write(tmp_path, layer_tensors())
    whole = load_layer(folder, device="cpu", dtype=torch.float32)(x)
    layers = [load_layer(folder, device="cpu", dtype=torch.float32, experts=part) for part in parts]
    assert [layer.config.num_local_experts for layer in layers] == [len(part) for part in parts]
    # two float32 sums of the same two terms, in another order
    torch.testing.assert_close(sum(layer(x) for layer in layers), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [iter, torch.tensor, range, lambda ids: tuple(map(torch.tensor, ids))])
def test_experts_of_any_kind_of_sequence(tmp_path: Path, x: Tensor, kind: Any) -> None:
    folder = write(tmp_path, layer_tensors())
    given = range(2, 4) if kind is range else kind([2, 3])
    layer = load_layer(folder, device="cpu", dtype=torch.float32, experts=given)
    assert torch.equal(layer(x), load_layer(folder, device="cpu", dtype=torch.float32, experts=[2, 3])(x))


@pytest.mark.parametrize("experts", [[1.0, 2], [True], ["1"], [None], [-1], 3])
def test_experts_that_are_no_ids(tmp_path: Path, experts: Any) -> None:
    with pytest.raises(ConfigError, match=r"experts .*0\.\.3"):
        load_layer(write(tmp_path, layer_tensors()), device="cpu", experts=experts)


def test_assumed_routing_is_warned_of(tmp_path: Path, x: Tensor) -> None:
    folder = write(tmp_path, layer_tensors(), model_type="new")
    with pytest.warns(CheckpointWarning, match="model_type 'new'"):
        layer = load_layer(folder, device="cpu", dtype=torch.float32, assume=True)
    assert layer(x).shape == x.shape


def test_unknown_family_is_refused_unless_it_is_described(tmp_path: Path, x: Tensor) -> None:
    folder = write(tmp_path, layer_tensors(), model_type="new")
    for given in ({}, {"routing": "softmax"}, {"activation": "silu"}):
        with pytest.raises(CheckpointError, match="model_type 'new'"):
            load_layer(folder, device="cpu", **given)
    layer = load_layer(folder, device="cpu", dtype=torch.float32, routing="sigmoid", activation="gelu")
    assert (layer.routing, layer.config.activation) == (RoutingConfig("sigmoid", renormalize=False), MoEActivation.GELU)
    assert layer(x).shape == x.shape


def test_a_layer_without_routing_says_why(tmp_path: Path, x: Tensor) -> None:
    folder = write(tmp_path, layer_tensors(), model_type="phimoe")
    layer = load_layer(folder, device="cpu", dtype=torch.float32)
    for call in (lambda: layer(x), lambda: layer.route(layer.router_logits(x))):
        with pytest.raises(ConfigError, match="topk_weights .*SparseMixer"):
            call()
    ids = torch.zeros(len(x), 2, dtype=torch.int32)
    ids[:, 1] = 1
    assert layer(x, topk_weights=torch.ones(len(x), 2), topk_ids=ids).shape == x.shape
    left = load_layer(write(tmp_path / "b", layer_tensors()), device="cpu", dtype=torch.float32, routing="per_call")
    with pytest.raises(ConfigError, match="routing"):
        left(x)


def test_selection_comes_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **kwargs: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(PlainLayout, "load", load)
    with pytest.raises(SelectionError, match="sm90"):
        load_layer(write(tmp_path, layer_tensors()), device="cpu", backend="gpu")


def test_reload_from_another_checkpoint(tmp_path: Path, x: Tensor) -> None:
    layer = load_layer(write(tmp_path / "a", layer_tensors()), device="cpu", dtype=torch.float32)
    pointer = layer.weights.w13.data_ptr()
    other = write(tmp_path / "b", expert_tensors(seed=7))
    new = load_layer(other, device="cpu", dtype=torch.float32)
    from moe_core.checkpoint import read_layer

    layer.reload(read_layer(Checkpoint.open(other)).weights())
    logits = layer.router_logits(x)
    assert torch.equal(layer(x, router_logits=logits), new(x, router_logits=logits))
    assert layer.weights.w13.data_ptr() == pointer


def test_an_open_checkpoint_is_taken_too(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, layer_tensors()))
    assert load_layer(checkpoint, device="cpu").config.intermediate_size == N


def test_what_is_refused(tmp_path: Path, x: Tensor) -> None:
    folder = write(tmp_path, expert_tensors())
    with pytest.raises(CheckpointError, match="layer 5 "):
        load_layer(folder, layer=5, device="cpu")
    with pytest.raises(ConfigError, match="experts holds 4"):
        load_layer(folder, experts=[E], device="cpu")
    layer = load_layer(folder, device="cpu", dtype=torch.float32)
    with pytest.raises(TensorError, match="router_weight"):
        layer(x)
    with pytest.raises(TensorError, match="topk_ids"):
        layer(x, topk_weights=torch.ones(6, 2))


def test_a_router_that_cannot_be_written_leaves_the_experts_as_they_are(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", layer_tensors()), write(tmp_path / "b", layer_tensors(seed=4))
    layer = load_layer(first, device="cpu", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in layer.weights.tensors()}
    assert layer.router_weight is not None
    layer.router_weight = layer.router_weight[:, :1].expand_as(layer.router_weight)
    with pytest.raises(TensorError, match="router_weight"):
        layer.reload(second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.weights.tensors())


def test_reload_from_a_folder(tmp_path: Path, x: Tensor) -> None:
    first, second = write(tmp_path / "a", layer_tensors()), write(tmp_path / "b", layer_tensors(seed=4))
    layer = load_layer(first, device="cpu", dtype=torch.float32)
    pointers = [tensor.data_ptr() for _, tensor in layer.weights.tensors()]
    expected = load_layer(second, device="cpu", dtype=torch.float32)(x)
    assert not torch.equal(layer(x), expected)
    for given in (second, str(second), Checkpoint.open(second)):
        layer.reload(given)
        # the router came along
        assert torch.equal(layer(x), expected)
    assert [tensor.data_ptr() for _, tensor in layer.weights.tensors()] == pointers
    part = load_layer(first, device="cpu", dtype=torch.float32, experts=[3, 0])
    part.reload(second)
    assert torch.equal(part(x), load_layer(second, device="cpu", dtype=torch.float32, experts=[3, 0])(x))
    with pytest.raises(ConfigError, match="layer="):
        layer.reload(read_layer(Checkpoint.open(second), dtype=torch.float32).weights(), layer=0)


def test_reload_goes_by_what_was_given(tmp_path: Path, x: Tensor) -> None:
    described: dict[str, Any] = {"routing": "sigmoid", "activation": "gelu", "stack": "b"}
    folders = []
    for number in range(2):
        tensors = {**expert_tensors("a.layers.0.mlp"), **expert_tensors("b.layers.0.mlp", seed=number)}
        gate = torch.randn(E, K, generator=torch.Generator().manual_seed(number))
        folders.append(write(tmp_path / str(number), {**tensors, "b.layers.0.mlp.gate.weight": gate}, model_type="new"))
    first, second = (load_layer(path, device="cpu", dtype=torch.float32, **described) for path in folders)
    assert not torch.equal(first(x), second(x))
    first.reload(folders[1])
    assert torch.equal(first(x), second(x))


def test_reload_takes_the_same_layer_of_another_checkpoint_or_the_one_that_is_named(tmp_path: Path, x: Tensor) -> None:
    folders = [
        write(tmp_path / name, layer_tensors(0, seed=seed) | layer_tensors(1, seed=seed + 1))
        for name, seed in (("a", 1), ("b", 3))
    ]
    layer = load_layer(folders[0], layer=1, device="cpu", dtype=torch.float32)
    layer.reload(folders[1])
    assert torch.equal(layer(x), load_layer(folders[1], layer=1, device="cpu", dtype=torch.float32)(x))
    layer.reload(folders[1], layer=0)
    assert torch.equal(layer(x), load_layer(folders[1], layer=0, device="cpu", dtype=torch.float32)(x))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_act": "gelu"}, "activation=MoEActivation.GELU"),
        ({"num_experts_per_tok": 1}, "top_k=1"),
    ],
)
def test_reload_refuses_another_layer(tmp_path: Path, x: Tensor, config: dict[str, Any], message: str) -> None:
    layer = load_layer(write(tmp_path / "a", layer_tensors()), device="cpu", dtype=torch.float32)
    expected = layer(x)
    with pytest.raises(ConfigError, match=message):
        layer.reload(write(tmp_path / "b", layer_tensors(seed=4), **config))
    assert torch.equal(layer(x), expected)
