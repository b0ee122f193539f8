from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, ConfigError, Registry, SchemeNotInstalledError
from moe_core.checkpoint import (
    BadValuesError,
    Checkpoint,
    ExpertLayout,
    LayerExperts,
    check_expert_tensor,
    find_layer,
    load_stacked,
    read_layer,
)
from moe_core.checkpoint.detect import likely_scheme
from moe_core_checkpoints import E, K, N, PlainFormat, entry_points, expert_tensors, layer_tensors, write


@pytest.fixture
def plugins() -> Registry:
    return Registry(lambda group: list(entry_points(group=group)))


def test_read_layer(tmp_path: Path, plugins: Registry) -> None:
    tensors = {**layer_tensors(0), **layer_tensors(3)}
    checkpoint = Checkpoint.open(write(tmp_path, tensors, shards=2))
    source = read_layer(checkpoint, 3, dtype=torch.float16, plugins=plugins)
    assert (source.index, source.prefix, source.scheme) == (3, "model.layers.3.mlp.experts", "plain")
    assert isinstance(source.format, PlainFormat)
    assert source.config.dtype is torch.float16
    assert source.experts == tuple(range(E))
    assert source.router_weight is not None
    assert torch.equal(source.router_weight, tensors["model.layers.3.mlp.gate.weight"])
    weights = source.weights()
    weights.validate(source.config)
    for expert in range(E):
        name = f"model.layers.3.mlp.experts.{expert}"
        assert torch.equal(weights.w13[expert, :N], tensors[f"{name}.gate_proj.weight"])
        assert torch.equal(weights.w13[expert, N:], tensors[f"{name}.up_proj.weight"])
        assert torch.equal(weights.w2[expert], tensors[f"{name}.down_proj.weight"])


def test_some_experts_in_an_order_of_their_own(tmp_path: Path, plugins: Registry) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, layer_tensors()))
    whole = read_layer(checkpoint, plugins=plugins).weights()
    source = read_layer(checkpoint, experts=[3, 1], plugins=plugins)
    assert source.config.num_local_experts == 2
    part = source.weights()
    part.validate(source.config)
    assert torch.equal(part.w13, whole.w13[[3, 1]])
    assert torch.equal(part.w2, whole.w2[[3, 1]])


@pytest.mark.parametrize("experts", [[], [0, 0], [E], [-1]])
def test_experts_that_are_not_there(tmp_path: Path, plugins: Registry, experts: list[int]) -> None:
    with pytest.raises(ConfigError, match="experts"):
        read_layer(Checkpoint.open(write(tmp_path, layer_tensors())), experts=experts, plugins=plugins)


def test_tensors_read_are_not_views_of_the_file(tmp_path: Path, plugins: Registry) -> None:
    """Writing into loaded weights, or the file's end, touches nothing else."""
    folder = write(tmp_path, layer_tensors())
    source = read_layer(Checkpoint.open(folder), plugins=plugins)
    weights = source.weights()
    before = (folder / "model.safetensors").read_bytes()
    weights.w13.zero_()
    assert source.router_weight is not None
    source.router_weight.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def layer(folder: Path) -> LayerExperts:
    return find_layer(Checkpoint.open(write(folder, expert_tensors())))


def test_load_stacked_arranges_and_checks(tmp_path: Path) -> None:
    tensors = expert_tensors()
    prefix = "model.layers.0.mlp.experts"
    tensors[f"{prefix}.1.up_proj.weight"][2, 3] = float("nan")
    found = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    out = load_stacked(
        found, ("gate", "up"), "weight", experts=[2, 0], device="cpu", dtype=torch.float32, arrange=lambda t: t.mT
    )
    assert out.dtype is torch.float32
    assert out.shape == (2, 2 * K, N)
    assert torch.equal(out[0, :K], tensors[f"{prefix}.2.gate_proj.weight"].mT.float())

    with pytest.raises(BadValuesError, match=r"experts\.1\.up_proj\.weight") as caught:
        load_stacked(found, ("gate", "up"), "weight", experts=range(E), device="cpu", check=lambda t: t.isnan().any())
    assert (caught.value.tensor, caught.value.count) == (f"{prefix}.1.up_proj.weight", 1)


def with_method(folder: Path, quantization: Mapping[str, Any] | None) -> Checkpoint:
    return Checkpoint.open(write(folder, layer_tensors(), quantization_config=quantization))


def test_unknown_quant_method(tmp_path: Path, plugins: Registry) -> None:
    with pytest.raises(CheckpointError, match=r"'fancy'.*plain\nplain"):
        read_layer(with_method(tmp_path, {"quant_method": "fancy"}), plugins=plugins)


class OtherFormat(PlainFormat):
    name = "other"
    quant_methods = ("other",)

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> str:
        return "it is always something else"


class Counted(PlainFormat):
    asked = 0

    def resolve(self, quantization: Mapping[str, Any], layer: LayerExperts) -> ExpertLayout | str:
        Counted.asked += 1
        return super().resolve(quantization, layer)


def test_a_layer_is_resolved_once(tmp_path: Path, plugins: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its layout found serves selection and every loading."""
    monkeypatch.setattr(Counted, "asked", 0)
    with_formats(plugins, OtherFormat, Counted, monkeypatch=monkeypatch)
    source = read_layer(Checkpoint.open(write(tmp_path, layer_tensors())), plugins=plugins)
    assert (source.weight_key, source.activation_key) == (source.layout.weight_key, source.layout.activation_key)
    assert torch.equal(source.weights().w2, source.weights().w2)
    assert Counted.asked == 1


class OtherPlainFormat(OtherFormat):
    name = "other plain"
    quant_methods = ()


def with_formats(plugins: Registry, *formats: type[PlainFormat], monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(plugins, "formats", lambda scheme: formats)
    return plugins


def test_formats_of_the_method_alone_say_why(
    tmp_path: Path, plugins: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {name: t.to(torch.int8) for name, t in layer_tensors().items() if ".experts." in name}
    checkpoint = Checkpoint.open(write(tmp_path, tensors, quantization_config={"quant_method": "other"}))
    with_formats(plugins, OtherPlainFormat, OtherFormat, monkeypatch=monkeypatch)
    with pytest.raises(CheckpointError, match=r"other \(plain\)"):
        read_layer(checkpoint, plugins=plugins)


def test_experts_that_are_not_quantized(tmp_path: Path, plugins: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = with_method(tmp_path, {"quant_method": "other"})
    with_formats(plugins, OtherFormat, monkeypatch=monkeypatch)
    with pytest.raises(CheckpointError, match="experts .*'other'"):
        read_layer(checkpoint, plugins=plugins)


def test_other_shapes_of_the_same_values(tmp_path: Path) -> None:
    found = layer(tmp_path)
    check_expert_tensor(found, "up", "weight", (N * K,), (torch.bfloat16,), also=((N, K), (1, N, K)))
    with pytest.raises(CheckpointError, match=rf"\[{N}, {K}\]"):
        check_expert_tensor(found, "up", "weight", (N * K,), (torch.bfloat16,), "why", also=((K, N),))


def test_no_quant_method(tmp_path: Path, plugins: Registry) -> None:
    with pytest.raises(CheckpointError, match="quant_method"):
        read_layer(with_method(tmp_path, None), plugins=plugins)


def test_no_scheme_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"moe-fp8"):
        read_layer(with_method(tmp_path, {"quant_method": "plain"}), plugins=Registry(lambda _: []))


CT_INT4 = {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}, "input_activations": None}}}
CT_INT8 = {
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}, "input_activations": {"num_bits": 8}}}
}
CT_W8A16 = {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}, "input_activations": None}}}
CT_W4AFP8 = {
    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}, "input_activations": {"type": "float"}}}
}
CT_FP8 = {"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}}}
CT_FP4 = {"config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 4}}}}


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq"}, "wna16"),
        ({"quant_method": "awq"}, "wna16"),
        ({"quant_method": "auto-round"}, "wna16"),
        ({"quant_method": "intel/auto-round"}, "wna16"),
        ({"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8}, "fp8"),
        ({"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4}, "mxfp4"),
        ({"quant_method": "mxfp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", **CT_INT4}, "wna16"),
        ({"quant_method": "compressed-tensors", **CT_INT8}, "int8"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized", **CT_W8A16}, "int8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", **CT_W8A16}, "wna16"),
        ({"quant_method": "compressed-tensors", **CT_W4AFP8}, "wna16"),
        ({"quant_method": "compressed-tensors", **CT_FP8}, "fp8"),
        ({"quant_method": "compressed-tensors", **CT_FP4}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "wna16"),
        ({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "W8A16"}, "int8"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "mxfp4"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}, "int8"),
    ],
)
def test_scheme_that_is_not_installed(
    tmp_path: Path, plugins: Registry, quantization: dict[str, Any], scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(SchemeNotInstalledError, match=f"install moe-{scheme}"):
        read_layer(with_method(tmp_path, quantization), plugins=plugins)


def test_package_without_kernels(tmp_path: Path, plugins: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(SchemeNotInstalledError, match=r"moe-wna16 0\.1\.0"):
        read_layer(with_method(tmp_path, {"quant_method": "gptq"}), plugins=plugins)


@pytest.mark.parametrize(
    "quantization",
    [
        {},
        {"quant_method": "modelopt", "quant_algo": "NVIDIA"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1, "b": {"weights": 2}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "float", "num_bits": [8]}}}},
        {"quant_method": "quark"},
    ],
)
def test_no_hint_where_nothing_tells(quantization: dict[str, Any]) -> None:
    assert likely_scheme(quantization) is None
