"""The modular kernel: arguments, formats, the operator, reloading, the layer."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from moe_core import (
    ConfigError,
    DeviceInfo,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoELayer,
    RoutingConfig,
    TensorError,
    route,
)
from moe_core.experts import FusedMoEExperts
from moe_core.oracle import default_prepare_finalize
from moe_core.prepare_finalize import BatchedPrepareAndFinalize
from moe_core_toys import (
    BatchedToyExperts,
    MonolithicToyExperts,
    ToyExperts,
    ToyOracle,
    UnreducedToyExperts,
    toy_weights,
)
from torch import Tensor

CONFIG = FusedMoEConfig(
    num_experts=6,
    top_k=2,
    hidden_size=16,
    intermediate_size=12,
    dtype=torch.float32,
    has_bias=True,
    routing=RoutingConfig.from_method("Renormalize"),
)
CPU = DeviceInfo.parse("cpu")


def make(experts: type[FusedMoEExperts], config: FusedMoEConfig = CONFIG) -> FusedMoEKernel:
    instance = experts(config, weight_key=None, activation_key=None, device=CPU)
    weights = experts.convert(toy_weights(config), config)
    return FusedMoEKernel(instance, weights, None if experts.is_monolithic else default_prepare_finalize(config))


def inputs(tokens: int = 5, config: FusedMoEConfig = CONFIG, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, config.hidden_size, generator=generator).to(config.dtype)
    logits = torch.randn(tokens, config.num_experts, generator=generator)
    assert config.routing is not None
    weights, ids = route(logits, top_k=config.top_k, config=config.routing)
    return x, logits, weights, ids


BATCHED = replace(CONFIG, activation_format=FusedMoEActivationFormat.BATCHED)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("experts", "config"), [(UnreducedToyExperts, CONFIG), (BatchedToyExperts, BATCHED)], ids=["unreduced", "batched"]
)
def test_every_way_through_gives_the_same(experts: type[FusedMoEExperts], config: FusedMoEConfig, tokens: int) -> None:
    x, _, weights, ids = inputs(tokens)
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    output = torch.full_like(expected, float("nan"))
    found = make(experts, config).apply(x, topk_weights=weights, topk_ids=ids, output=output)
    assert found is output
    # the same products summed over two slots: one float32 rounding each
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * 16)


def test_monolithic_experts_route_as_configured() -> None:
    x, logits, weights, ids = inputs()
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    kernel = make(MonolithicToyExperts)
    assert torch.equal(kernel.apply_monolithic(x, router_logits=logits), expected)
    with pytest.raises(ConfigError, match="call apply_monolithic"):
        kernel.apply(x, topk_weights=weights, topk_ids=ids)
    with pytest.raises(ConfigError, match="does not route"):
        make(ToyExperts).apply_monolithic(x, router_logits=logits)


@pytest.mark.parametrize(("experts", "config"), [(ToyExperts, CONFIG), (BatchedToyExperts, BATCHED)])
def test_expert_maps_add_up_to_the_whole(experts: type[FusedMoEExperts], config: FusedMoEConfig) -> None:
    x, _, weights, ids = inputs(7)
    whole = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    total = torch.zeros_like(whole)
    full = toy_weights(CONFIG)
    for mine in ([0, 3, 5], [1, 2, 4]):
        local = replace(config, num_local_experts=3)
        part = replace(full, **{name: tensor[mine] for name, tensor in full.tensors()})
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(3, dtype=torch.int32)
        instance = experts(local, weight_key=None, activation_key=None, device=CPU)
        kernel = FusedMoEKernel(instance, experts.convert(part, local), default_prepare_finalize(local))
        total += kernel.apply(x, topk_weights=weights, topk_ids=ids, expert_map=expert_map)
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=1e-6 * 16)


def test_batched_router_weight_on_input_and_invalid_ids() -> None:
    config = replace(CONFIG, top_k=1, apply_router_weight_on_input=True)
    x = inputs()[0]
    weights = torch.rand(5, 1) + 0.5
    ids = torch.tensor([[0], [-1], [5], [6], [2]])
    expected = make(ToyExperts, config).apply(x, topk_weights=weights, topk_ids=ids)
    assert bool((expected[[1, 3]] == 0).all())
    batched = make(BatchedToyExperts, replace(config, activation_format=FusedMoEActivationFormat.BATCHED))
    torch.testing.assert_close(batched.apply(x, topk_weights=weights, topk_ids=ids), expected, rtol=1e-6, atol=1e-5)


GOOD = dict(zip(("x", "logits", "topk_weights", "topk_ids"), inputs(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 15)}, r"hidden_states has shape \[5, 15\], expected \[M, 16\]"),
        (
            {"x": torch.zeros(5, 16, dtype=torch.float16)},
            "hidden_states has dtype torch.float16, expected torch.float32",
        ),
        ({"topk_ids": GOOD["topk_ids"][:4]}, r"topk_ids has shape \[4, 2\], expected \[5, 2\]"),
        (
            {"topk_ids": GOOD["topk_weights"], "topk_weights": GOOD["topk_ids"]},
            "topk_weights has dtype torch.int32, expected torch.float32",
        ),
        ({"topk_ids": GOOD["topk_ids"].to(torch.int16)}, "topk_ids has dtype torch.int16, expected torch.int32 or"),
        ({"expert_map": torch.zeros(5, dtype=torch.int32)}, r"expert_map has shape \[5\], expected \[6\]"),
        ({"expert_map": torch.zeros(6)}, "expert_map has dtype torch.float32, expected torch.int32"),
        ({"output": torch.zeros(5, 32)[:, ::2]}, r"output has strides \(32, 2\), expected contiguous"),
        ({"output": torch.zeros(4, 16)}, r"output has shape \[4, 16\], expected \[5, 16\]"),
        ({"x": torch.zeros(5, 16, device="meta")}, "hidden_states is on meta, the layer's weights are on cpu"),
    ],
)
def test_arguments_are_checked(change: dict[str, Tensor], message: str) -> None:
    arguments = {name: tensor for name, tensor in GOOD.items() if name != "logits"} | change
    x = arguments.pop("x")
    with pytest.raises(TensorError, match=message):
        make(ToyExperts).apply(x, **arguments)


def test_a_missing_expert_map_is_noticed() -> None:
    x, _, weights, ids = inputs()
    with pytest.raises(TensorError, match=r"expert_map \[6\] is missing: this rank holds 3 of 6 experts"):
        make(ToyExperts, replace(CONFIG, num_local_experts=3)).apply(x, topk_weights=weights, topk_ids=ids)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    experts = ToyExperts(CONFIG, weight_key=None, activation_key=None, device=CPU)
    weights = ToyExperts.convert(toy_weights(CONFIG), CONFIG)
    with pytest.raises(ConfigError, match="BatchedPrepareAndFinalize brings the batched format, .* takes standard"):
        FusedMoEKernel(experts, weights, BatchedPrepareAndFinalize(CONFIG))
    with pytest.raises(ConfigError, match="is modular and needs prepare_finalize"):
        FusedMoEKernel(experts, weights)


def test_the_operator_is_well_formed_and_compiles_whole() -> None:
    kernel = make(ToyExperts)
    x, _, weights, ids = inputs()
    expected = kernel.apply(x, topk_weights=weights, topk_ids=ids)
    arguments = (torch.empty_like(x), x, weights, ids, None, kernel._handle)
    torch.library.opcheck(torch.ops.moe_core.fused_moe.default, arguments)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return kernel.apply(x * 1.0, topk_weights=weights, topk_ids=ids) + 0.0

    assert torch.equal(model(x, weights, ids), expected)


def test_the_monolithic_operator_compiles_whole() -> None:
    kernel = make(MonolithicToyExperts)
    x, logits, _, _ = inputs()
    torch.library.opcheck(
        torch.ops.moe_core.fused_moe_monolithic.default,
        (torch.empty_like(x), x, logits, None, None, kernel._handle),
    )

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor, logits: Tensor) -> Tensor:
        return kernel.apply_monolithic(x, router_logits=logits)

    assert torch.equal(model(x, logits), kernel.apply_monolithic(x, router_logits=logits))


def test_a_compiled_graph_does_not_keep_a_layer_alive() -> None:
    kernel = make(ToyExperts)
    handle = kernel._handle
    x, _, weights, ids = inputs()
    del kernel
    gc.collect()
    with pytest.raises(ConfigError, match=f"kernel {handle} no longer exists"):
        torch.ops.moe_core.fused_moe(torch.empty_like(x), x, weights, ids, None, handle)


def make_layer(config: FusedMoEConfig = CONFIG) -> FusedMoELayer:
    return FusedMoELayer.from_weights(
        ToyOracle(),
        config,
        toy_weights(config),
        router_weight=torch.randn(6, 16, generator=torch.Generator().manual_seed(3)),
    )


def test_layer_routes_by_what_it_is_given() -> None:
    layer = make_layer()
    x, logits, weights, ids = inputs()
    expected = layer.kernel.apply(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(layer(x, topk_weights=weights, topk_ids=ids), expected)
    assert torch.equal(layer(x, router_logits=logits), expected)
    assert torch.equal(layer(x.view(1, 5, 16), router_logits=logits), expected.view(1, 5, 16))
    assert layer.router_weight is not None
    own = layer(x, router_logits=x @ layer.router_weight.T)
    assert torch.equal(layer(x), own)
    with pytest.raises(TensorError, match="topk_ids is missing"):
        layer(x, topk_weights=weights)
    assert "backend=plain" in repr(layer)


def test_reload_replaces_in_place_and_refuses_whole() -> None:
    layer = make_layer()
    x, _, weights, ids = inputs()
    pointers = [t.data_ptr() for _, t in layer.weights.tensors()]
    new = toy_weights(CONFIG, seed=9)
    layer.reload(new)
    assert [t.data_ptr() for _, t in layer.weights.tensors()] == pointers
    fresh = FusedMoELayer.from_weights(ToyOracle(), CONFIG, new)
    expected = fresh(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(layer(x, topk_weights=weights, topk_ids=ids), expected)
    with pytest.raises(TensorError, match="w2 has shape"):
        layer.reload(replace(new, w2=new.w2[:, :8]))
    assert torch.equal(layer(x, topk_weights=weights, topk_ids=ids), expected)


def test_moving_a_layer_is_refused_with_the_reason() -> None:
    layer = make_layer()
    assert layer.to("cpu") is layer
    with pytest.raises(ConfigError, match="laid out for cpu .* can't be moved to meta"):
        layer.to("meta")
