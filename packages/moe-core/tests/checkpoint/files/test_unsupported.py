"""Kinds of checkpoints that are known and not read: named as what they are, with what helps."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, Registry
from moe_core.checkpoint import Checkpoint, ExpertLayout, read_layer
from moe_core_checkpoints import CONFIG, E, K, N, PlainFormat, PlainLayout, layer_tensors, write
from torch import Tensor

PREFIX = "model.layers.0.mlp.experts"


def experts(**parts: Tensor) -> dict[str, Tensor]:
    """Tensors of every matrix of every expert; ``__`` stands for a dot."""
    return {
        f"{PREFIX}.{e}.{matrix}_proj.{suffix.replace('__', '.')}": tensor.clone()
        for e in range(E)
        for matrix in ("gate", "up", "down")
        for suffix, tensor in parts.items()
    }


def refused(path: Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_layer(Checkpoint.open(path))
    for part in parts:
        assert part in caught.value.message
    return caught.value.message


BYTES, SCALES, ONE = (
    torch.zeros(N, K // 2, dtype=torch.uint8),
    torch.ones(N, K // 16).to(torch.float8_e4m3fn),
    torch.ones(1),
)

STATIC_W4AFP8 = {
    "targets": ["Linear"],
    "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128},
    "input_activations": {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False},
}

# as each tool names an expert's tensors
KINDS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "modelopt NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        experts(weight=BYTES, weight_scale=SCALES, weight_scale_2=ONE, input_scale=ONE),
        "NVFP4",
    ),
    "compressed-tensors NVFP4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        experts(weight_packed=BYTES, weight_scale=SCALES, weight_global_scale=ONE, input_global_scale=ONE),
        "NVFP4",
    ),
    "AutoRound NVFP4": (
        {"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4},
        experts(weight_packed=BYTES, weight_scale=SCALES),
        "NVFP4",
    ),
    "bitsandbytes NF4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        experts(weight=BYTES.reshape(-1, 1), weight__absmax=ONE, weight__quant_map=ONE),
        "bitsandbytes",
    ),
    "bitsandbytes int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        experts(weight=torch.zeros(N, K, dtype=torch.int8), SCB=ONE),
        "bitsandbytes",
    ),
    "EXL2": ({"quant_method": "exl2"}, experts(q_weight=ONE, q_scale=ONE, q_scale_max=ONE, q_invperm=ONE), "EXL2"),
    "EXL3": ({"quant_method": "exl3"}, experts(trellis=ONE, suh=ONE, svh=ONE), "EXL3 (ExLlamaV3)"),
    "EXL3 without a config": ({}, experts(trellis=ONE, suh=ONE, svh=ONE), "EXL3 (ExLlamaV3)"),
    "HQQ": ({"quant_method": "hqq"}, experts(W_q=BYTES, scale=ONE, zero=ONE), "HQQ"),
    "torchao": ({"quant_method": "torchao", "quant_type": "int4"}, experts(weight=BYTES, scale=ONE), "torchao"),
    "FP-Quant": ({"quant_method": "fp_quant"}, experts(qweight=BYTES, scales=ONE), "FP-Quant"),
    "W4AFP8": (
        {"quant_method": "w4afp8"},
        experts(weight=BYTES.view(torch.int8), weight_scale_inv=ONE, input_scale=ONE),
        "W4AFP8 (SGLang: INT4 weights with static FP8 activations)",
    ),
    "W4AFP8 under the name of its attention": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        experts(weight=BYTES.view(torch.int8), weight_scale_inv=ONE, input_scale=ONE),
        "W4AFP8 (SGLang: INT4 weights with static FP8 activations)",
    ),
    "ModelOpt W4A8_AWQ": (
        {"quant_method": "modelopt", "quant_algo": "w4a8_awq"},
        experts(weight=BYTES, weight_scale=ONE, weight_scale_2=ONE, pre_quant_scale=ONE, input_scale=ONE),
        "W4A8_AWQ (INT4 weights with static FP8 activations)",
    ),
    "compressed-tensors W4AFP8, static": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": STATIC_W4AFP8}},
        experts(weight_packed=torch.zeros(N, K // 8, dtype=torch.int32), weight_scale=ONE, input_scale=ONE),
        "INT4 weights with static FP8 activations",
    ),
    "AQLM": ({"quant_method": "AQLM"}, experts(codes=BYTES, codebooks=ONE, scales=ONE), "AQLM"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantizations(tmp_path: Path, kind: str, only_plain: Registry) -> None:
    quantization, tensors, name = KINDS[kind]
    checkpoint = Checkpoint.open(write(tmp_path, tensors, quantization_config=quantization or None))
    with pytest.raises(CheckpointError) as caught:
        read_layer(checkpoint, plugins=only_plain)
    error = caught.value
    assert f"{PREFIX} is quantized as {name}" in error.message
    stored = {part.rpartition("down_proj.")[2] for part in tensors if f"{PREFIX}.0.down_proj." in part}
    assert f"(tensors {min(stored)} " in error.message
    assert all(f" {suffix} " in error.message for suffix in stored)
    for part in ("which is not supported", "GPTQ", "MXFP4", "--quantize"):
        assert part in error.message
    assert "plain 16-bit (plain)" in error.details


@pytest.fixture
def only_plain() -> Registry:
    return plain_and(PlainFormat)


def plain_and(kind: type[PlainFormat]) -> Registry:
    point = importlib.metadata.EntryPoint("plain", "moe_core_checkpoints:SCHEME", "moe_core.schemes")
    plugins = Registry(lambda group: [point] if group == "moe_core.schemes" else [])
    if kind is not PlainFormat:
        plugins.formats = lambda name: (kind,)  # type: ignore[method-assign]
    return plugins


class FormatOfSomebody(PlainFormat):
    name = "HQQ of somebody"

    def resolve(self, quantization: Any, layer: Any) -> ExpertLayout | str:
        return PlainLayout(layer, None, None)


def test_a_format_of_another_package_comes_first(tmp_path: Path) -> None:
    quantization, tensors, _ = KINDS["HQQ"]
    checkpoint = Checkpoint.open(write(tmp_path, tensors, quantization_config=quantization))
    assert read_layer(checkpoint, plugins=plain_and(FormatOfSomebody)).format.name == "HQQ of somebody"


def test_experts_that_were_left_in_16_bits_are_no_such_thing(tmp_path: Path, only_plain: Registry) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, layer_tensors(), quantization_config={"quant_method": "hqq"}))
    with pytest.raises(CheckpointError) as caught:
        read_layer(checkpoint, plugins=only_plain)
    assert "is quantized as" not in str(caught.value)


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize(("file", "name"), [("model-Q4_K_M.gguf", "GGUF (llama.cpp)"), ("model.onnx", "ONNX")])
def test_files(tmp_path: Path, file: str, name: str, config: bool) -> None:
    (tmp_path / file).touch()
    if config:
        (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, f"{file} is {name}, which is not supported", "--quantize")
    refused(tmp_path / file, f"{file} is {name}, which is not supported")


def test_safetensors_beside_other_files(tmp_path: Path) -> None:
    write(tmp_path, layer_tensors())
    (tmp_path / "model.gguf").touch()
    assert Checkpoint.open(tmp_path).moe_layers == (0,)


def test_names_of_mlx(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.switch_mlp.gate_proj.weight"
    refused(write(tmp_path, {name: torch.zeros(2)}), "no layer has MoE experts", f"{name} is MLX's", "not supported")


@pytest.mark.parametrize("inner", [None, {"hidden_size": 8, "num_experts": 0}])
def test_dense_models(tmp_path: Path, inner: dict[str, Any] | None) -> None:
    config = {"model_type": "llama", "hidden_size": 8} | ({} if inner is None else {"text_config": inner})
    tensors = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}
    refused(write(tmp_path, tensors, config), "is a dense model (model_type 'llama')", "mixture-of-experts")


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts"])
def test_models_whose_config_names_experts_are_not_dense(tmp_path: Path, key: str) -> None:
    config = {key: 8} if key in CONFIG else {"thinker_config": {"text_config": {key: 8}}}
    tensors = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}
    assert "dense" not in refused(write(tmp_path, tensors, config), "no layer has MoE experts")
