"""The modular kernel: arguments, formats, the operator, reloading, the layer."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_core import (
    ConfigError,
    DeviceInfo,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEKernel,
    FusedMoELayer,
    KernelWeights,
    Prepared,
    QuantKey,
    RoutingConfig,
    TensorError,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8StaticTensorSym,
    route,
)
from moe_core.interface.experts import FusedMoEExperts
from moe_core.interface.prepare_finalize import TokenRouting
from moe_core.parallel.prepare_finalize.batched import BatchedPrepareAndFinalize
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core_toys import (
    BatchedToyExperts,
    MonolithicToyExperts,
    ToyExperts,
    UnreducedToyExperts,
    toy_oracle,
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
    weights = instance.convert(toy_weights(config))
    return FusedMoEKernel(instance, weights, None if experts.is_monolithic else default_prepare_finalize(config))


def test_a_kernel_says_what_it_is_made_of() -> None:
    assert repr(make(ToyExperts)) == "FusedMoEKernel(ToyExperts, PrepareAndFinalizeNoParallel)"


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
    for call in (kernel.apply, kernel.start):
        with pytest.raises(ConfigError, match="call apply_monolithic"):
            call(x, topk_weights=weights, topk_ids=ids)
    with pytest.raises(TensorError, match=r"router_logits .*\[4, 6\]"):
        kernel.apply_monolithic(x, router_logits=logits[:4])
    with pytest.raises(TensorError, match=r"expert_map .*\[5\]"):
        kernel.apply_monolithic(x, router_logits=logits, expert_map=torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ConfigError, match="route"):
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
        kernel = FusedMoEKernel(instance, instance.convert(part), default_prepare_finalize(local))
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
        ({"x": torch.zeros(5, 15)}, r"hidden_states .*\[5, 15\]"),
        (
            {"x": torch.zeros(5, 16, dtype=torch.float16)},
            "hidden_states .*torch.float16",
        ),
        ({"topk_ids": GOOD["topk_ids"][:4]}, r"topk_ids .*\[4, 2\]"),
        (
            {"topk_ids": GOOD["topk_weights"], "topk_weights": GOOD["topk_ids"]},
            "topk_weights .*torch.int32",
        ),
        ({"topk_ids": GOOD["topk_ids"].to(torch.int16)}, "topk_ids .*torch.int16"),
        ({"expert_map": torch.zeros(5, dtype=torch.int32)}, r"expert_map .*\[5\]"),
        ({"expert_map": torch.zeros(6)}, "expert_map .*torch.float32"),
        ({"output": torch.zeros(5, 32)[:, ::2]}, r"output .*\(32, 2\)"),
        ({"output": torch.zeros(4, 16)}, r"output .*\[4, 16\]"),
        ({"x": torch.zeros(5, 16, device="meta")}, "hidden_states .*meta"),
    ],
)
def test_arguments_are_checked(change: dict[str, Tensor], message: str) -> None:
    arguments = {name: tensor for name, tensor in GOOD.items() if name != "logits"} | change
    x = arguments.pop("x")
    with pytest.raises(TensorError, match=message):
        make(ToyExperts).apply(x, **arguments)


def test_a_missing_expert_map_is_noticed() -> None:
    x, _, weights, ids = inputs()
    with pytest.raises(TensorError, match=r"expert_map \[6\]"):
        make(ToyExperts, replace(CONFIG, num_local_experts=3)).apply(x, topk_weights=weights, topk_ids=ids)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    experts = ToyExperts(CONFIG, weight_key=None, activation_key=None, device=CPU)
    weights = experts.convert(toy_weights(CONFIG))
    with pytest.raises(ConfigError, match="BatchedPrepareAndFinalize"):
        FusedMoEKernel(experts, weights, BatchedPrepareAndFinalize(CONFIG))
    with pytest.raises(ConfigError, match="prepare_finalize"):
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
    with pytest.raises(ConfigError, match=f"kernel {handle} "):
        torch.ops.moe_core.fused_moe(torch.empty_like(x), x, weights, ids, None, handle)


def make_layer(config: FusedMoEConfig = CONFIG) -> FusedMoELayer:
    return FusedMoELayer.from_weights(
        toy_oracle(),
        config,
        toy_weights(config),
        router_weight=torch.randn(6, 16, generator=torch.Generator().manual_seed(3)),
        copy=True,
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
    # in steps, between which other work may run
    assert torch.equal(layer.start(x, topk_weights=weights, topk_ids=ids).result(), expected)
    calls = [layer.start(x), layer.start(x, router_logits=logits, tokens_per_rank=[5])]
    calls[1].run_experts()
    assert torch.equal(calls[0].result(), own)
    assert torch.equal(calls[1].result(), expected)
    for call in (layer, layer.start):
        with pytest.raises(TensorError, match="topk_ids"):
            call(x, topk_weights=weights)
    assert "backend=plain" in repr(layer)


def test_reload_replaces_in_place_and_refuses_whole() -> None:
    layer = make_layer()
    x, _, weights, ids = inputs()
    pointers = [t.data_ptr() for _, t in layer.weights.tensors()]
    new = toy_weights(CONFIG, seed=9)
    layer.reload(new)
    assert [t.data_ptr() for _, t in layer.weights.tensors()] == pointers
    fresh = FusedMoELayer.from_weights(toy_oracle(), CONFIG, new)
    expected = fresh(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(layer(x, topk_weights=weights, topk_ids=ids), expected)
    with pytest.raises(TensorError, match="w2 has shape"):
        layer.reload(replace(new, w2=new.w2[:, :8]))
    assert torch.equal(layer(x, topk_weights=weights, topk_ids=ids), expected)


def test_moving_a_layer_is_refused_with_the_reason() -> None:
    layer = make_layer()
    assert layer.to("cpu") is layer
    with pytest.raises(ConfigError, match=r"\bmeta\b"):
        layer.to("meta")


def test_columns_that_are_not_contiguous_are_refused() -> None:
    _, _, weights, ids = inputs()
    with pytest.raises(TensorError, match=r"hidden_states .*\(1, 5\)"):
        make(ToyExperts).apply(torch.zeros(16, 5).T, topk_weights=weights, topk_ids=ids)


class SeesStrides(ToyExperts):
    """Notes whether what the interface promises to be contiguous is so."""

    def apply(self, output: Tensor, hidden_states: Tensor, weights: KernelWeights, **named: Any) -> None:
        for name in ("topk_weights", "topk_ids", "expert_map"):
            assert named[name] is None or named[name].is_contiguous(), name
        super().apply(output, hidden_states, weights, **named)


def test_experts_get_contiguous_routing() -> None:
    x, _, weights, ids = inputs()
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    identity = torch.arange(6, dtype=torch.int32).repeat_interleave(2)[::2]
    strided = {"topk_weights": weights.T.contiguous().T, "topk_ids": ids.T.contiguous().T, "expert_map": identity}
    assert not any(tensor.is_contiguous() for tensor in strided.values())
    assert torch.equal(make(SeesStrides).apply(x, **strided), expected)


def test_weights_are_brought_into_rows_before_conversion() -> None:
    weights = toy_weights(CONFIG)
    strided = replace(weights, w13=weights.w13.mT.contiguous().mT, w13_bias=weights.w13_bias)
    assert strided.w13.stride(-1) != 1
    oracle = toy_oracle()
    selection = oracle.select(CONFIG, weight_key=None, activation_key=None, device="cpu")
    converted = oracle.convert(selection, strided)
    assert converted.w13.stride(-1) == 1
    assert torch.equal(converted.w13, weights.w13)
    assert oracle.convert(selection, weights).w13 is weights.w13


def test_other_weights_are_taken_from_the_next_call_on() -> None:
    kernel, other = make(ToyExperts), make(ToyExperts)
    other.weights = other.experts.convert(toy_weights(CONFIG, seed=9))
    x, _, weights, ids = inputs()
    before = kernel.apply(x, topk_weights=weights, topk_ids=ids)
    begun = kernel.start(x, topk_weights=weights, topk_ids=ids)
    kernel.weights = other.weights
    expected = other.apply(x, topk_weights=weights, topk_ids=ids)
    assert not torch.equal(before, expected)
    assert torch.equal(kernel.apply(x, topk_weights=weights, topk_ids=ids), expected)
    # a call that had begun has those that it began with
    assert torch.equal(begun.result(), before)
    with pytest.raises(ConfigError, match="weights .*MoEWeights"):
        kernel.weights = toy_weights(CONFIG)  # type: ignore[assignment]
    assert kernel.weights is other.weights


def test_routing_on_another_device_is_named() -> None:
    x, _, weights, ids = inputs()
    with pytest.raises(TensorError, match="topk_ids .*meta"):
        make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids.to("meta"))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("monolithic", [False, True])
def test_layers_are_not_exported(monolithic: bool, strict: bool) -> None:
    """Loaded in another process, the program would run whatever layer has the number there."""
    x, logits, weights, ids = inputs()
    kernel = make(MonolithicToyExperts if monolithic else ToyExperts)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if monolithic:
                return kernel.apply_monolithic(x, router_logits=logits)
            return kernel.apply(x, topk_weights=weights, topk_ids=ids)

    # older Dynamos can't trace the making of an error, and show where it was
    said = r"torch\.export" + (r"|in _refuse_export\n" if strict else "")
    with pytest.raises(Exception, match=said), torch.no_grad():
        torch.export.export(Model(), (x,), strict=strict)


def test_a_copied_layer_compiles_to_its_own_weights() -> None:
    layer = make_layer()
    x, _, weights, ids = inputs()
    copied = copy.deepcopy(layer)
    copied.weights.w2.zero_()
    assert copied.weights.quant_config.w2_bias is not None
    copied.weights.quant_config.w2_bias.zero_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: Tensor) -> Tensor:
        return copied.kernel.apply(x, topk_weights=weights, topk_ids=ids)

    assert not bool(model(x).any())
    assert bool(layer(x, topk_weights=weights, topk_ids=ids).any())


def test_a_layer_does_not_overwrite_weights_that_it_shares() -> None:
    weights = toy_weights(CONFIG)
    before = weights.w13.clone()
    shared = FusedMoELayer.from_weights(toy_oracle(), CONFIG, weights)
    with pytest.raises(ConfigError, match="copy=True"):
        shared.reload(toy_weights(CONFIG, seed=9))
    FusedMoELayer.from_weights(toy_oracle(), CONFIG, weights, copy=True).reload(toy_weights(CONFIG, seed=9))
    assert torch.equal(weights.w13, before)


class UnreducedOnInput(UnreducedToyExperts):
    claims = replace(UnreducedToyExperts.claims, apply_router_weight_on_input=True)


def test_a_router_weight_on_the_input_counts_once() -> None:
    config = replace(CONFIG, top_k=1, apply_router_weight_on_input=True)
    x = inputs()[0]
    weights, ids = torch.rand(5, 1) + 0.5, torch.tensor([[0], [1], [2], [3], [4]])
    expected = make(ToyExperts, config).apply(x, topk_weights=weights, topk_ids=ids)
    found = make(UnreducedOnInput, config).apply(x, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


class Exchange(PrepareAndFinalizeNoParallel):
    """Stands for an all-to-all that brings as many tokens as it took, in another order."""

    collective = True

    def __init__(self, config: FusedMoEConfig) -> None:
        super().__init__(config)
        self.calls: list[str] = []
        self.counts: list[Any] = []

    def max_tokens(self, num_tokens: int) -> int:
        return 2 * num_tokens

    def prepare(self, hidden_states: Tensor, routing: TokenRouting, *quantized: Any) -> Prepared:
        self.calls.append("prepare")
        self.counts.append(routing.tokens_per_rank)
        flipped = TokenRouting(routing.topk_weights.flip(0), routing.topk_ids.flip(0))
        return super().prepare(hidden_states.flip(0), flipped, *quantized)

    def finalize(self, output: Tensor, expert_output: Tensor, *others: Any) -> None:
        self.calls.append("finalize")
        output.zero_()
        output += expert_output.flip(0)


@pytest.mark.parametrize("tokens", [0, 5])
def test_ranks_take_part_in_an_exchange_with_and_without_tokens(tokens: int) -> None:
    x, _, weights, ids = inputs(tokens)
    movement = Exchange(CONFIG)
    instance = ToyExperts(CONFIG, weight_key=None, activation_key=None, device=CPU)
    kernel = FusedMoEKernel(instance, instance.convert(toy_weights(CONFIG)), movement)
    found = kernel.apply(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(found, make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids))
    assert movement.calls == ["prepare", "finalize"]


@pytest.mark.parametrize("compiled", [False, True])
def test_prepare_is_told_how_many_tokens_ranks_bring(compiled: bool) -> None:
    x, _, weights, ids = inputs()
    movement = Exchange(CONFIG)
    instance = ToyExperts(CONFIG, weight_key=None, activation_key=None, device=CPU)
    kernel = FusedMoEKernel(instance, instance.convert(toy_weights(CONFIG)), movement)
    call = torch.compile(kernel.apply, backend="eager", fullgraph=True) if compiled else kernel.apply
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    assert torch.equal(call(x, topk_weights=weights, topk_ids=ids, tokens_per_rank=[5, 0, 2]), expected)
    assert torch.equal(call(x, topk_weights=weights, topk_ids=ids), expected)
    assert movement.counts == [[5, 0, 2], None]


@pytest.mark.parametrize("room", [None, 5])
def test_an_expert_chosen_twice_counts_twice_in_batches_too(room: int | None) -> None:
    x, _, weights, _ = inputs()
    # every token on one expert: with a row for each pair there would be twice as many as fit
    ids = torch.tensor([[3, 3]] * 4 + [[1, 3]])
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    kernel = make(BatchedToyExperts, replace(BATCHED, max_num_tokens=room))
    found = kernel.apply(x, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * 16)
    # two global experts that the map gives the same place
    both = torch.tensor([-1, 1, 0, 1, -1, -1], dtype=torch.int32)
    local = replace(CONFIG, num_local_experts=2)
    standard, batched = (
        make(experts, replace(config, num_local_experts=2)).apply(
            x, topk_weights=weights, topk_ids=ids, expert_map=both
        )
        for experts, config in ((ToyExperts, local), (BatchedToyExperts, kernel.config))
    )
    torch.testing.assert_close(batched, standard, rtol=1e-6, atol=1e-6 * 16)


def test_batched_buffers_have_the_configured_room() -> None:
    config = replace(BATCHED, max_num_tokens=7)
    x, _, weights, ids = inputs(5)
    prepared = BatchedPrepareAndFinalize(config).prepare(x, TokenRouting(weights, ids))
    assert tuple(prepared.hidden_states.shape) == (6, 7, 16)
    expected = make(ToyExperts).apply(x, topk_weights=weights, topk_ids=ids)
    found = make(BatchedToyExperts, config).apply(x, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    with pytest.raises(TensorError, match="max_num_tokens .*7"):
        make(BatchedToyExperts, config).apply(*inputs(8)[:1], topk_weights=torch.rand(8, 2), topk_ids=inputs(8)[3])


@pytest.mark.parametrize("key", [kFp8DynamicTensorSym, kFp8StaticTensorSym, kFp8Dynamic128Sym])
def test_prepare_quantizes_into_batches_by_any_key(key: QuantKey) -> None:
    x, _, weights, ids = inputs(5)
    static_scale = torch.tensor([0.01]) if key.is_static else None
    prepared = BatchedPrepareAndFinalize(BATCHED).prepare(x, TokenRouting(weights, ids), key, static_scale)
    assert prepared.scale is not None
    shape = (1,) if key.group_shape.is_per_tensor else (6, 5, 1)
    assert tuple(prepared.scale.shape) == shape
    values = prepared.hidden_states.float() * prepared.scale
    for expert in range(6):
        mine = x[(ids == expert).any(dim=1)]
        # half a step of e4m3: 2**-4 of the value, and of the smallest ones 2**-10 of the scale
        allowed = mine.abs() * 2.0**-4 + float(prepared.scale.max()) * 2.0**-10
        assert bool(((values[expert, : len(mine)] - mine).abs() <= allowed).all())
