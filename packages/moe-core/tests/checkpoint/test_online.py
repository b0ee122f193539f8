"""16-bit experts, read and quantized at load: every naming, and what can't be."""

from __future__ import annotations

import importlib.metadata
import json
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe_core_checkpoints as support
import pytest
import torch
from moe_core import (
    Backend,
    CheckpointError,
    ConfigError,
    FusedMoEConfig,
    MoEWeights,
    PluginWarning,
    Registry,
    RegistryError,
    SchemeSpec,
    TensorError,
    load_layer,
)
from moe_core.checkpoint import Checkpoint, find_layer, read_layer
from moe_core.checkpoint import online as module
from moe_core.checkpoint.experts.unquantized import UnquantizedLayout, unquantized_tensor
from moe_core.kernels.ops.online import OnlineQuantization
from moe_core.layer.layer import FusedMoELayer
from moe_core.reference.quantization import Quantized, quantize_weight
from moe_core.reference.torch_experts import TorchExperts
from moe_core.selection.registry import registry
from moe_core.spec.quant_key import kFp8StaticTensorSym, kInt4Static32Asym, kInt8DynamicTokenSym, kInt8StaticChannelSym
from moe_core_checkpoints import E, K, N, expert_tensors, layer_tensors, write
from moe_core_toys import PLAIN
from torch import Tensor

INT8 = OnlineQuantization("int8_rows", "plain", kInt8StaticChannelSym, kInt8DynamicTokenSym)
INT4 = OnlineQuantization("int4", "plain", kInt4Static32Asym.with_group(1, 8), None)


class Experts(TorchExperts):
    claims = replace(
        PLAIN,
        keys=((None, None), (INT8.weight_key, INT8.activation_key), (INT4.weight_key, None)),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
    )


SCHEME = replace(support.SCHEME, backends=(Backend("torch", (Experts,)),), formats=(), online=(INT8, INT4))


def points(*schemes: SchemeSpec) -> Any:
    """Entry points of an installation with these schemes."""
    holder = types.SimpleNamespace(**{s.name: s for s in schemes})

    class Point(importlib.metadata.EntryPoint):
        def load(self) -> Any:
            return getattr(holder, self.name)

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        return [Point(s.name, f"x:{s.name}", group) for s in schemes] if group == "moe_core.schemes" else []

    return entry_points


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry_points = points(SCHEME)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: entry_points(group))
    registry.cache_clear()
    yield
    registry.cache_clear()


def folder(path: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    return write(path, tensors, quantization_config=None, **changes)


def stacked(block: str, *, transposed: bool = False, names: tuple[str, str] = ("gate_up_proj", "down_proj")) -> Any:
    """The experts of `expert_tensors` as stacked tensors."""
    one = expert_tensors(block)
    gate, up, down = (
        torch.stack([one[f"{block}.experts.{e}.{name}.weight"] for e in range(E)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    made = (torch.cat([gate, up], 1), down)
    return {f"{block}.{name}": (t.mT if transposed else t).contiguous() for name, t in zip(names, made, strict=True)}


NAMINGS: dict[str, tuple[str, dict[str, Tensor]]] = {
    "one by one": ("qwen3_moe", expert_tensors()),
    "w1 w3 w2": ("mixtral", expert_tensors("model.layers.0.block_sparse_moe", ("w1", "w3", "w2"))),
    "stacked": ("qwen3_moe", stacked("model.layers.0.mlp", names=("experts.gate_up_proj", "experts.down_proj"))),
    "stacked, transposed": (
        "qwen3_vl_moe",
        stacked("model.layers.0.mlp", transposed=True, names=("experts.gate_up_proj", "experts.down_proj")),
    ),
    "Granite": (
        "granitemoe",
        stacked("model.layers.0.block_sparse_moe", names=("input_linear.weight", "output_linear.weight")),
    ),
}


def in_turns(rows: Tensor) -> Tensor:
    """[E, 2N, ...] gate rows, then up rows, as gpt-oss has them."""
    gate, up = rows.chunk(2, dim=1)
    return torch.stack([gate, up], dim=2).reshape(rows.shape)


def canonical() -> MoEWeights:
    """What each of NAMINGS holds."""
    one = expert_tensors()
    gate, up, down = (
        torch.stack([one[f"model.layers.0.mlp.experts.{e}.{name}.weight"] for e in range(E)])
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    return MoEWeights(weight_key=None, activation_key=None, w13=torch.cat([gate, up], 1), w2=down)


def equal(found: MoEWeights, want: MoEWeights) -> None:
    assert (found.weight_key, found.activation_key) == (want.weight_key, want.activation_key)
    mine, theirs = dict(found.tensors()), dict(want.tensors())
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype is tensor.dtype
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("chunk", [1, 1 << 30], ids=["expert by expert", "at once"])
@pytest.mark.parametrize("online", [INT8, INT4], ids=str)
@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming(
    naming: str, online: OnlineQuantization, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    family, tensors = NAMINGS[naming]
    source = read_layer(Checkpoint.open(folder(tmp_path, tensors, model_type=family)), quantize=online.name)
    assert (source.scheme, source.weight_key, source.activation_key) == (
        "plain",
        online.weight_key,
        online.activation_key,
    )
    assert online.name in source.format.name
    equal(source.weights(), online.quantize(canonical()))
    chosen = read_layer(source.layer.checkpoint, quantize=online, experts=[2, 0]).weights()
    assert torch.equal(chosen.w2, source.weights().w2[[2, 0]])


def test_one_chunk_of_16_bit_weights_exists_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watched(UnquantizedLayout):
        def load(self, config: FusedMoEConfig, *, experts: Any, device: Any = "cpu") -> MoEWeights:
            assert len(experts) == 1
            assert [one for one in seen if one() is not None] == []
            found = super().load(config, experts=experts, device=device)
            seen.extend(map(weakref.ref, (found.w13, found.w2)))
            return found

    monkeypatch.setattr(module, "CHUNK_BYTES", 1)
    source = read_layer(Checkpoint.open(folder(tmp_path, expert_tensors())), quantize=INT8)
    stored = Watched(source.layer, None, None)
    layout = module.OnlineLayout(source.layer, INT8.weight_key, INT8.activation_key, stored, INT8)
    equal(layout.load(source.config, experts=range(E)), INT8.quantize(canonical()))
    assert len(seen) == 2 * E


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_floating_point_types(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in expert_tensors().items()}
    source = read_layer(Checkpoint.open(folder(tmp_path, tensors)), quantize="int8_rows")
    plain = canonical()
    equal(source.weights(), INT8.quantize(replace(plain, w13=plain.w13.to(dtype), w2=plain.w2.to(dtype))))


def test_experts_without_a_gate(tmp_path: Path) -> None:
    tensors = expert_tensors("model.layers.0.mixer", ("up_proj", "down_proj"))
    path = folder(tmp_path, tensors, model_type="new", mlp_hidden_act="relu2", hidden_act=None)
    routing = {"routing": "softmax", "activation": "relu2_no_mul"}
    layer = load_layer(path, **routing, quantize="int8_rows", device="cpu", dtype=torch.float32)
    want = torch.stack([tensors[f"model.layers.0.mixer.experts.{e}.up_proj.weight"] for e in range(E)])
    assert torch.equal(layer.weights.w13, quantize_weight(want, INT8.weight_key).values)


def test_biases_are_carried_through(tmp_path: Path) -> None:
    tensors = expert_tensors()
    for expert in range(E):
        for name, rows in (("gate_proj", N), ("up_proj", N), ("down_proj", K)):
            tensors[f"model.layers.0.mlp.experts.{expert}.{name}.bias"] = torch.randn(rows).bfloat16()
    weights = read_layer(Checkpoint.open(folder(tmp_path, tensors)), quantize="int4").weights()
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    for expert in range(E):
        block = f"model.layers.0.mlp.experts.{expert}"
        gate, up, down = (tensors[f"{block}.{p}_proj.bias"].float() for p in ("gate", "up", "down"))
        assert torch.equal(weights.w13_bias[expert], torch.cat([gate, up]))
        assert torch.equal(weights.w2_bias[expert], down)


def test_a_layer_is_quantized_at_load_and_again_at_reload(tmp_path: Path) -> None:
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(3))
    first, second = (
        folder(tmp_path / "a", layer_tensors()),
        folder(tmp_path / "b", layer_tensors(0) | expert_tensors(seed=9)),
    )
    layer = load_layer(first, quantize="int8_rows", device="cpu", dtype=torch.float32)
    other = load_layer(second, quantize="int8_rows", device="cpu", dtype=torch.float32)
    assert not torch.equal(layer(x), other(x))
    pointer = layer.weights.w13.data_ptr()
    stored = UnquantizedLayout(find_layer(Checkpoint.open(second)), None, None)
    new = stored.load(layer.config, experts=range(E))
    layer.reload(new)
    assert torch.equal(layer(x), other(x))
    assert layer.weights.w13.data_ptr() == pointer
    by_hand = FusedMoELayer.from_weights("plain", layer.config, new, quantize="int8_rows", copy=True)
    assert torch.equal(by_hand.weights.w2, layer.weights.w2)
    with pytest.raises(TensorError, match=r"\bweights\b"):
        by_hand.reload(INT4.quantize(new))
    with pytest.raises(TensorError, match=r"w13 has shape \[4, 32, 31\]"):
        layer.reload(replace(new, w13=new.w13[:, :, 1:]))


@pytest.mark.parametrize("part", [None, "text_config", "llm_config", "language_config"])
@pytest.mark.parametrize("transposed", [True, False])
def test_gpt_oss(tmp_path: Path, transposed: bool, part: str | None) -> None:
    """Gate and up rows in turns, in weights and biases."""
    want = canonical()
    w13_bias, w2_bias = torch.randn(E, 2 * N).bfloat16(), torch.randn(E, K).bfloat16()
    prefix = "model.layers.0.mlp.experts"
    weights = {"gate_up_proj": in_turns(want.w13), "down_proj": want.w2}
    tensors = {f"{prefix}.{n}": (t.mT if transposed else t).contiguous() for n, t in weights.items()}
    tensors |= {f"{prefix}.gate_up_proj_bias": in_turns(w13_bias), f"{prefix}.down_proj_bias": w2_bias}
    path = folder(tmp_path, tensors, model_type="gpt_oss")
    if part is not None:
        config = json.loads((path / "config.json").read_text())
        wrapper = {"model_type": "internvl_chat", part: {**config, "temperature": 1.0}}
        (path / "config.json").write_text(json.dumps(wrapper))
    found = read_layer(Checkpoint.open(path), quantize="int8_rows", experts=[3, 1]).weights()
    plain = replace(want, w13_bias=w13_bias.float(), w2_bias=w2_bias.float())
    chosen: dict[str, Any] = {name: tensor[[3, 1]] for name, tensor in plain.tensors()}
    equal(found, INT8.quantize(replace(plain, **chosen)))


def test_one_canonical_tensor_of_16_bit_experts(tmp_path: Path) -> None:
    want, biases = canonical(), {}
    for expert in range(E):
        for projection, rows in (("gate", N), ("up", N), ("down", K)):
            biases[f"model.layers.0.mlp.experts.{expert}.{projection}_proj.bias"] = torch.randn(rows).bfloat16()
    layer = find_layer(Checkpoint.open(folder(tmp_path / "a", expert_tensors() | biases)))
    config = FusedMoEConfig(num_experts=E, top_k=1, hidden_size=K, intermediate_size=N)
    assert torch.equal(unquantized_tensor(layer, "w13", config), want.w13)
    assert torch.equal(unquantized_tensor(layer, "w2", config), want.w2)
    gate, up, down = (
        torch.stack([biases[f"model.layers.0.mlp.experts.{e}.{name}_proj.bias"] for e in range(E)]).float()
        for name in ("gate", "up", "down")
    )
    assert torch.equal(unquantized_tensor(layer, "w13_bias", config), torch.cat((gate, up), dim=1))
    assert torch.equal(unquantized_tensor(layer, "w2_bias", config), down)
    with pytest.raises(CheckpointError, match="gate_proj.weight"):
        unquantized_tensor(layer, "w13", replace(config, intermediate_size=2 * N))
    fp8 = {name: t.to(torch.float8_e4m3fn) for name, t in expert_tensors().items()}
    with pytest.raises(CheckpointError, match="down_proj.weight"):
        unquantized_tensor(find_layer(Checkpoint.open(folder(tmp_path / "b", fp8))), "w13", config)


def test_a_quantizer_of_ones_own(tmp_path: Path) -> None:
    def halves(w: Tensor, parts: int) -> Quantized:
        return quantize_weight(w / 2, INT8.weight_key, parts=parts)

    mine = replace(INT8, name="mine", quantizer=halves)
    weights = read_layer(Checkpoint.open(folder(tmp_path, expert_tensors())), quantize=mine).weights()
    assert torch.equal(weights.w13, halves(canonical().w13, 2).values)


def test_what_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", expert_tensors())
    with pytest.raises(ConfigError, match="quantize='fp9'"):
        load_layer(path, quantize="fp9", device="cpu")
    with pytest.raises(CheckpointError, match=r"BF16.*int4, int8_rows"):
        load_layer(path, device="cpu")
    fp8 = {name: t.to(torch.float8_e4m3fn) for name, t in expert_tensors().items()}
    with pytest.raises(CheckpointError, match=r"down_proj.weight .*F8_E4M3"):
        load_layer(folder(tmp_path / "b", fp8), quantize="int4", device="cpu")
    mixed = {name: t.half() if "up_proj" in name else t for name, t in expert_tensors().items()}
    with pytest.raises(CheckpointError, match=r"up_proj.weight .*float16"):
        load_layer(folder(tmp_path / "d", mixed), quantize="int4", device="cpu")
    broken = expert_tensors()
    broken["model.layers.0.mlp.experts.2.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"experts.2.up_proj.weight .*\[3, 4\]"):
        load_layer(folder(tmp_path / "e", broken), quantize="int4", device="cpu")
    with pytest.raises(CheckpointError, match=r"gate_proj.weight .*\[16, 32\]"):
        load_layer(folder(tmp_path / "f", expert_tensors(), hidden_size=48), quantize="int4", device="cpu")
    with pytest.raises(TensorError, match="int8_rows .*kInt8StaticChannelSym"):
        INT8.quantize(INT8.quantize(canonical()))
    with pytest.raises(TensorError, match=r"w13 .*\[4, 31, 32\]"):
        INT8.quantize(replace(canonical(), w13=canonical().w13[:, 1:]))
    with pytest.raises(ConfigError, match="kFp8StaticTensorSym"):
        OnlineQuantization("x", "plain", INT8.weight_key, kFp8StaticTensorSym)


def test_names_are_the_installations() -> None:
    again, elsewhere = replace(INT8, scheme="other"), replace(INT8, scheme="third")
    registry_of = Registry(points(SCHEME, replace(SCHEME, name="other", online=(again,))))
    with pytest.warns(PluginWarning, match="'int8_rows' .*other"):
        assert "int8_rows" not in registry_of.online_names()
    with pytest.raises(RegistryError, match="'int8_rows' .*other"):
        registry_of.online("int8_rows")
    wrong = Registry(points(replace(SCHEME, online=(elsewhere,))))
    with pytest.raises(RegistryError, match="'third', .*'plain'"):
        wrong.online("int8_rows")
    with pytest.raises(ConfigError, match="quantize"):
        Registry(points()).online("int8_rows")
