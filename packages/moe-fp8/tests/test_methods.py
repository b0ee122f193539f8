"""The methods of engines that keep weights as parameters: from checkpoint tensors to a kernel, again and again."""

from __future__ import annotations

from typing import Any

import moe_fp8
import pytest
import torch
from moe_core import (
    ConfigError,
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    MoEWeights,
    SelectionError,
    TensorError,
    fused_moe_reference,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.reference.quantization import quantize_moe_weights
from moe_core_toys import MonolithicToyExperts
from moe_fp8 import Fp8OnlineMoEMethod, ModelOptMxfp8MoEMethod, select_mxfp8_moe_backend
from moe_fp8.online import ONLINE
from torch import Tensor, nn

CONFIG = FusedMoEConfig(num_experts=4, top_k=2, hidden_size=64, intermediate_size=96, has_bias=True)
PLAIN = FusedMoEConfig(
    num_experts=4, top_k=2, hidden_size=64, intermediate_size=96, activation=MoEActivation.RELU2_NO_MUL
)
CONFIGS = {"gated, with biases": CONFIG, "squared ReLU without a gate": PLAIN}


def sixteen_bit(config: FusedMoEConfig, seed: int) -> MoEWeights:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, size: float) -> Tensor:
        return (size * torch.randn(shape, generator=generator)).to(config.dtype)

    experts, hidden, inter = config.local_experts, config.hidden_size, config.intermediate_size
    return MoEWeights(
        weight_key=None,
        activation_key=None,
        w13=make(experts, config.w13_rows, hidden, size=hidden**-0.5),
        w2=make(experts, hidden, inter, size=inter**-0.5),
        w13_bias=make(experts, config.w13_rows, size=1.0) if config.has_bias else None,
        w2_bias=make(experts, hidden, size=1.0) if config.has_bias else None,
    )


def mxfp8(config: FusedMoEConfig, seed: int) -> MoEWeights:
    source = sixteen_bit(config, seed)
    return quantize_moe_weights(
        source.w13,
        source.w2,
        gated=config.is_gated,
        weight_key=kMxfp8Static,
        activation_key=kMxfp8Dynamic,
        w13_bias=source.w13_bias,
        w2_bias=source.w2_bias,
    )


def load(method: Any, layer: nn.Module, weights: MoEWeights) -> None:
    """Tensor by tensor, as a checkpoint has them."""
    config = method.config
    for name, tensor in weights.tensors():
        stem, _, rest = name.partition("_")
        parameter = f"{stem}_weight_{rest}" if rest == "scale" else name if rest else f"{stem}_weight"
        for expert in range(config.local_experts):
            if stem == "w2" or not config.is_gated:
                shard = "w2" if stem == "w2" else "w1"
                method.load_weight(layer, parameter, tensor[expert], shard_id=shard, expert_id=expert)
                continue
            gate, up = tensor[expert].chunk(2)
            method.load_weight(layer, parameter, gate, shard_id="w1", expert_id=expert)
            method.load_weight(layer, parameter, up, shard_id="w3", expert_id=expert)


def tokens(config: FusedMoEConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights, ids = torch.rand(7, config.num_experts, generator=generator).topk(config.top_k)
    return {"topk_weights": weights, "topk_ids": ids}


def states(config: FusedMoEConfig) -> Tensor:
    return torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(6)).to(config.dtype)


def close(found: Tensor, weights: MoEWeights, config: FusedMoEConfig) -> None:
    """Against float64: the torch backend works in float32, so rounding to bfloat16 is left, by half a step at most.

    The output is rounded, and activations in 16 bits between the products are.
    """
    expected = fused_moe_reference(states(config), weights, config, **tokens(config))
    roundings = 1 if weights.activation_key is not None else 2
    assert float((found.double() - expected).norm() / expected.norm()) < roundings * 2.0**-9 * 1.1


def made(method: Any, weights: MoEWeights) -> nn.Module:
    layer = nn.Module()
    method.create_weights(layer)
    load(method, layer, weights)
    method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("activation_key", [kMxfp8Dynamic, None], ids=["w8a8", "w8a16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_from_modelopt_tensors_to_a_kernel(name: str, activation_key: Any) -> None:
    config = CONFIGS[name]
    method = ModelOptMxfp8MoEMethod(config, activation_key=activation_key, device="cpu")
    weights = mxfp8(config, 0)
    layer = made(method, weights)
    y = method.apply(layer, states(config), **tokens(config))
    close(y, MoEWeights(**{**vars(weights), "activation_key": activation_key}), config)
    quant = method.get_fused_moe_quant_config()
    assert (quant.weight_key, quant.activation_key) == (kMxfp8Static, activation_key)
    assert quant.has_bias == config.has_bias


def test_processing_twice_changes_nothing() -> None:
    method = ModelOptMxfp8MoEMethod(CONFIG, device="cpu")
    layer = made(method, mxfp8(CONFIG, 0))
    assert method.kernel is not None
    kernel, before = method.kernel, {n: (t.data_ptr(), t.clone()) for n, t in method.kernel.weights.tensors()}
    method.process_weights_after_loading(layer)
    assert method.kernel is kernel
    after = dict(kernel.weights.tensors())
    assert before.keys() == after.keys()
    for name, (pointer, tensor) in before.items():
        assert after[name].data_ptr() == pointer
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("online", [None, "mxfp8_w8a16"])
def test_reloading_overwrites_the_kernel_in_place(online: str | None) -> None:
    method: Any = ModelOptMxfp8MoEMethod(CONFIG, device="cpu")
    if online is not None:
        method = Fp8OnlineMoEMethod(CONFIG, online, device="cpu")
    first, second = (mxfp8(CONFIG, seed) if online is None else sixteen_bit(CONFIG, seed) for seed in (0, 1))
    layer = made(method, first)
    kernel, pointers = method.kernel, {n: t.data_ptr() for n, t in method.kernel.weights.tensors()}
    before = method.apply(layer, states(CONFIG), **tokens(CONFIG))
    method.create_weights(layer)
    load(method, layer, second)
    method.process_weights_after_loading(layer)
    assert method.kernel is kernel
    assert {n: t.data_ptr() for n, t in kernel.weights.tensors()} == pointers
    after = method.apply(layer, states(CONFIG), **tokens(CONFIG))
    assert not torch.equal(before, after)
    close(after, second if online is None else method.online.quantize(second), CONFIG)


@pytest.mark.gpu
@pytest.mark.parametrize("online", [None, "fp8_per_channel"])
def test_captured_graphs_see_reloaded_weights(online: str | None) -> None:
    method: Any = ModelOptMxfp8MoEMethod(PLAIN, device="cuda") if online is None else None
    if online is not None:
        method = Fp8OnlineMoEMethod(PLAIN, online, device="cuda")
    first, second = (mxfp8(PLAIN, seed) if online is None else sixteen_bit(PLAIN, seed) for seed in (0, 1))
    layer = nn.Module()
    method.create_weights(layer, device="cuda")
    load(method, layer, first)
    method.process_weights_after_loading(layer)
    if not method.selection.experts.claims.cuda_graph:
        pytest.fail(f"{method.selection.backend} can't be captured; what runs MXFP8 and channels on a GPU can")
    x, arguments = states(PLAIN).cuda(), {name: tensor.cuda() for name, tensor in tokens(PLAIN).items()}
    out = torch.empty_like(x)
    method.apply(layer, x, output=out, **arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        method.apply(layer, x, output=out, **arguments)
    method.create_weights(layer)
    load(method, layer, second)
    method.process_weights_after_loading(layer)
    graph.replay()
    torch.cuda.synchronize()
    replayed = out.clone()
    assert torch.equal(replayed, method.apply(layer, x, **arguments))
    fresh = type(method)(PLAIN, *([] if online is None else [online]), device="cuda")
    other = nn.Module()
    fresh.create_weights(other, device="cuda")
    load(fresh, other, second)
    fresh.process_weights_after_loading(other)
    assert torch.equal(replayed, fresh.apply(other, x, **arguments))


def test_what_was_converted_is_freed_and_comes_back() -> None:
    method = Fp8OnlineMoEMethod(CONFIG, "fp8_per_block", device="cpu")
    layer = made(method, sixteen_bit(CONFIG, 0))
    assert layer.w13_weight.numel() == 0  # type: ignore[operator]
    method.process_weights_after_loading(layer)
    with pytest.raises(TensorError, match="w13_weight"):
        load(method, layer, sixteen_bit(CONFIG, 1))
    method.create_weights(layer)
    load(method, layer, sixteen_bit(CONFIG, 1))


@pytest.mark.parametrize("online", [o.name for o in ONLINE])
@pytest.mark.parametrize("name", CONFIGS)
def test_online_quantization_carries_biases(name: str, online: str) -> None:
    config, source = CONFIGS[name], sixteen_bit(CONFIGS[name], 0)
    method = Fp8OnlineMoEMethod(config, online, device="cpu")
    layer = made(method, source)
    quantized = moe_fp8.quantize_moe_weights(source, online)
    assert (quantized.w13_bias is None) == (not config.has_bias)
    quant = method.get_fused_moe_quant_config()
    assert (quant.activation_key is None) == online.endswith("_w8a16")
    if quantized.w13_bias is not None and quantized.w2_bias is not None:
        assert quant.w1_bias is not None
        assert quant.w2_bias is not None
        assert torch.equal(quant.w1_bias, quantized.w13_bias)
        assert torch.equal(quant.w2_bias, quantized.w2_bias)
    close(method.apply(layer, states(config), **tokens(config)), quantized, config)


def test_what_was_not_loaded_is_refused_by_name() -> None:
    for missing in ("w13_weight", "w2_weight_scale", "w13_bias"):
        method = ModelOptMxfp8MoEMethod(CONFIG, device="cpu")
        layer = nn.Module()
        method.create_weights(layer)
        load(method, layer, mxfp8(CONFIG, 0))
        fresh = nn.Module()
        method.create_weights(fresh)
        getattr(layer, missing).data[2] = getattr(fresh, missing).data[2]
        with pytest.raises(TensorError, match=f"{missing} .*2"):
            method.process_weights_after_loading(layer)
        with pytest.raises(ConfigError, match="kernel"):
            method.apply(layer, states(CONFIG), **tokens(CONFIG))


def test_tensors_that_do_not_fit_are_refused() -> None:
    method = ModelOptMxfp8MoEMethod(CONFIG, device="cpu")
    layer = nn.Module()
    method.create_weights(layer)
    scale = torch.zeros(96, 2, dtype=torch.uint8)
    method.load_weight(layer, "w13_weight_scale", scale.view(torch.float8_e8m0fnu), shard_id="w3", expert_id=0)
    assert torch.equal(layer.w13_weight_scale[0, 96:], scale)  # type: ignore[index]
    for name, tensor, shard, expert, message in (
        ("w13_scale", scale, "w1", 0, "w13_scale"),
        ("w13_weight_scale", scale, "w2", 0, "'w2' .*w13_weight_scale"),
        ("w13_weight_scale", scale, "w1", 4, "expert_id .*4"),
        ("w13_weight_scale", scale[:, :1], "w1", 0, r"\(w1 of .*\[96, 1\]"),
        ("w13_weight_scale", scale.float(), "w1", 0, "torch.float32"),
    ):
        with pytest.raises(TensorError, match=message):
            method.load_weight(layer, name, tensor, shard_id=shard, expert_id=expert)


def test_the_key_says_mxfp8() -> None:
    config = CONFIG
    selection = select_mxfp8_moe_backend(config, device="cpu")
    assert (selection.weight_key, selection.activation_key) == (kMxfp8Static, kMxfp8Dynamic)
    with pytest.raises(ConfigError, match="kMxfp8Static .*kFp8Static128BlockSym"):
        select_mxfp8_moe_backend(config, weight_key=kFp8Static128BlockSym, device="cpu")
    with pytest.raises(SelectionError, match="backend"):
        select_mxfp8_moe_backend(config, activation_key=kFp8Dynamic128Sym, device="cpu")
    # bytes are exponents of MXFP8 or they are refused: nothing has to be set beforehand, and nothing is guessed
    bytes_, floats = torch.full((4, 192, 2), 120, dtype=torch.uint8), torch.ones(4, 192, 2)
    for weight_only in (False, True):
        made = moe_fp8.make_fp8_moe_quant_config(
            w1_scale=bytes_, w2_scale=bytes_, block_shape=(1, 32), weight_only=weight_only
        )
        assert made.weight_key == kMxfp8Static
        with pytest.raises(ConfigError, match="block_shape"):
            moe_fp8.make_fp8_moe_quant_config(w1_scale=bytes_, w2_scale=bytes_, weight_only=weight_only)
        with pytest.raises(ConfigError, match="uint8"):
            moe_fp8.make_fp8_moe_quant_config(
                w1_scale=floats, w2_scale=floats, block_shape=(1, 32), weight_only=weight_only
            )
    with pytest.raises(TensorError, match="w1_scale .*torch.float32"):
        moe_fp8.make_fp8_moe_quant_config(w1_scale=floats, w2_scale=floats, weight_key=kMxfp8Static)


@pytest.mark.parametrize(
    ("key", "switches"),
    [
        (kFp8StaticTensorSym, {}),
        (kFp8StaticChannelSym, {"per_out_ch_quant": True}),
        (kFp8Static128BlockSym, {"block_shape": (128, 128)}),
        (kMxfp8Static, {"block_shape": (1, 32)}),
    ],
    ids=["tensor", "channel", "block", "mxfp8"],
)
def test_one_function_for_every_weight_only_kind(key: Any, switches: dict[str, Any]) -> None:
    w1_scale = torch.ones(4, 2, 2, dtype=key.scale.dtype)
    w2_scale, w1_bias, w2_bias = w1_scale + 1, torch.randn(4, 6), torch.randn(4, 3)
    by_switches = moe_fp8.make_fp8_moe_quant_config(
        w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias, weight_only=True, **switches
    )
    by_key = moe_fp8.make_fp8_moe_quant_config(
        w1_scale=w1_scale, w2_scale=w2_scale, w1_bias=w1_bias, w2_bias=w2_bias, weight_key=key
    )
    for config in (by_switches, by_key):
        assert (config.weight_key, config.activation_key) == (key, None)
        found = dict(config.tensors())
        assert {name: id(tensor) for name, tensor in found.items()} == {
            "w1_scale": id(w1_scale),
            "w2_scale": id(w2_scale),
            "w1_bias": id(w1_bias),
            "w2_bias": id(w2_bias),
        }


def test_contradicting_kinds_are_refused() -> None:
    scale = torch.ones(4, 2)
    for arguments, message in (
        ({"weight_key": kFp8StaticTensorSym, "per_out_ch_quant": True}, "weight_key"),
        ({"activation_key": kMxfp8Dynamic}, "weight_key"),
        ({"weight_only": True, "a1_scale": scale}, "weight_only"),
        (
            {"weight_only": True, "weight_key": kFp8StaticTensorSym, "activation_key": kMxfp8Dynamic},
            "weight_only",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            moe_fp8.make_fp8_moe_quant_config(w1_scale=scale, w2_scale=scale, **arguments)  # type: ignore[arg-type]


def test_modular_and_monolithic_dispatch_are_kept_apart() -> None:
    method = ModelOptMxfp8MoEMethod(CONFIG, device="cpu")
    layer = made(method, mxfp8(CONFIG, 0))
    assert not method.is_monolithic
    logits = torch.randn(7, 4)
    with pytest.raises(ConfigError, match="call apply"):
        method.apply_monolithic(layer, states(CONFIG), router_logits=logits)
    # the same method around a kernel that routes
    experts = MonolithicToyExperts(CONFIG, weight_key=None, activation_key=None)
    method.kernel = FusedMoEKernel(experts, experts.convert(sixteen_bit(CONFIG, 0)))
    with pytest.raises(ConfigError, match="apply_monolithic"):
        method.apply(layer, states(CONFIG), **tokens(CONFIG))
