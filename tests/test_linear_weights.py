"""Quantized linear layers as 16-bit weights: what formats make of experts they make of any matrix."""

from __future__ import annotations

import json
from pathlib import Path

import moe_core as mc
import pytest
import torch
from moe_core.api.models import quantized_linears
from moe_core.checkpoint import Checkpoint, read_layer
from moe_kit.changes import raw_file
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[1]
#: checkpoints of the tools whose experts have names of their own
CASES = [
    path.parent
    for path in sorted(ROOT.glob("packages/*/tests/data/*/config.json"))
    if any(".experts.0." in name for name in load_file(path.with_name("model.safetensors")))
]


def first_expert(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Names of the tensors of layer 0's first expert by projection."""
    found: dict[str, list[str]] = {}
    for (projection, _), tensors in checkpoint.expert_tensors()[0].tensors.items():
        found.setdefault(projection, []).append(tensors[0])
    return found


def values(weights: mc.MoEWeights, name: str, parts: int, cols: int) -> Tensor:
    """Canonical values [rows, cols] of the first expert in float32, with what is multiplied with its inputs."""
    key = weights.weight_key
    assert key is not None
    tensors = {n: getattr(weights, f"{name}_{n}") for n in ("scale", "zero_point", "g_idx", "pre_scale")}
    scale, zero_point, g_idx, factors = tensors.values()
    exact = mc.dequantize_weight(
        getattr(weights, name), scale, key, parts=parts, zero_point=zero_point, g_idx=g_idx, cols=cols
    )
    return (exact if factors is None else exact * factors[:, None])[0]


@pytest.mark.filterwarnings("ignore::moe_core.CheckpointWarning")
@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.name)
def test_an_experts_matrices_read_as_linear_layers(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    source = read_layer(checkpoint, dtype=torch.float32)
    weights = source.weights()
    gated = source.config.is_gated
    w13 = values(weights, "w13", 2 if gated else 1, source.config.hidden_size)
    w2 = values(weights, "w2", 1, source.config.intermediate_size)
    gate, up = w13.chunk(2) if gated else (w13[:0], w13)
    for projection, names in first_expert(checkpoint).items():
        if projection == "gate_up":
            continue  # gpt-oss's rows of gate and up in turns, which experts alone have
        (linear,) = quantized_linears(checkpoint, names)
        expected = {"gate": gate, "up": up, "down": w2}[projection]
        assert linear.name == names[0].rpartition(".")[0]
        assert set(linear.tensors) == {name for name in names if not name.endswith(".bias")}
        assert linear.shape == tuple(expected.shape)
        found = linear.dequantize(torch.float32)
        assert torch.equal(found, expected), projection
        assert torch.equal(linear.dequantize(), found.bfloat16())


def folder_of(path: Path, tensors: dict[str, Tensor], **quantization: object) -> Checkpoint:
    config = {"model_type": "qwen3_moe", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return Checkpoint.open(path)


def test_weights_in_16_bits_are_none(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(2, 2).bfloat16(), "a.bias": torch.ones(2), "norm.weight": torch.ones(2)}
    checkpoint = folder_of(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    assert not list(quantized_linears(checkpoint, checkpoint.names))


def test_biases_stay(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.full((1, 1), 0.5),
        "a.bias": torch.ones(4),
    }
    checkpoint = folder_of(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    (linear,) = quantized_linears(checkpoint, checkpoint.names)
    assert set(linear.tensors) == {"a.weight", "a.weight_scale_inv"}
    assert torch.equal(linear.dequantize(torch.float16), torch.full((4, 8), 0.5, dtype=torch.float16))


def test_static_scales_of_inputs_need_not_be_there(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "a.weight_scale": torch.tensor(0.5)}
    checkpoint = folder_of(tmp_path, tensors, quant_method="modelopt", quant_algo="FP8")
    (linear,) = quantized_linears(checkpoint, checkpoint.names)
    assert torch.equal(linear.dequantize(torch.float16), torch.full((4, 8), 0.5, dtype=torch.float16))


def test_negative_scales_of_integers(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.full((4, 8), -128, dtype=torch.int8), "a.weight_scale": torch.full((4, 1), -0.5)}
    weights = {"type": "int", "num_bits": 8, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    checkpoint = folder_of(tmp_path, tensors, quant_method="compressed-tensors", config_groups=groups)
    (linear,) = quantized_linears(checkpoint, checkpoint.names)
    assert torch.equal(linear.dequantize(torch.float16), torch.full((4, 8), 64, dtype=torch.float16))


SMOOTHED: dict[str, tuple[dict[str, str], Tensor, dict[str, Tensor]]] = {
    "INT8": (
        {"quant_algo": "W8A8_SQ_PER_CHANNEL"},
        torch.full((4, 8), 2, dtype=torch.int8),
        {"weight_scale": torch.full((4,), 0.5), "input_scale": torch.tensor(0.5)},
    ),
    "FP8": ({"quant_algo": "FP8"}, torch.ones(4, 8).to(torch.float8_e4m3fn), {"weight_scale": torch.tensor(1.0)}),
    "16 bits": ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, torch.ones(4, 8).bfloat16(), {}),
}


@pytest.mark.parametrize("name", SMOOTHED)
def test_factors_of_inputs_become_part_of_the_weight(tmp_path: Path, name: str) -> None:
    """SmoothQuant's, of every format, and beside a weight that is in 16 bits already."""
    settings, weight, others = SMOOTHED[name]
    factors = torch.arange(8).bfloat16() - 3
    tensors = {"a.weight": weight, "a.pre_quant_scale": factors} | {f"a.{n}": tensor for n, tensor in others.items()}
    checkpoint = folder_of(tmp_path, tensors, quant_method="modelopt", **settings)
    (linear,) = quantized_linears(checkpoint, checkpoint.names)
    assert (set(linear.tensors), linear.shape) == (set(tensors), (4, 8))
    assert torch.equal(linear.dequantize(), factors.expand(4, 8))


@pytest.mark.parametrize("name", SMOOTHED)
@pytest.mark.parametrize("factors", [torch.ones(4), torch.ones(1, 8), torch.full((8,), torch.nan)], ids=str)
def test_factors_that_do_not_fit(tmp_path: Path, name: str, factors: Tensor) -> None:
    settings, weight, others = SMOOTHED[name]
    tensors = {"a.weight": weight, "a.pre_quant_scale": factors} | {f"a.{n}": tensor for n, tensor in others.items()}
    checkpoint = folder_of(tmp_path, tensors, quant_method="modelopt", **settings)
    with pytest.raises(mc.CheckpointError, match=r"a\.pre_quant_scale"):
        for linear in quantized_linears(checkpoint, checkpoint.names):
            linear.dequantize()


@pytest.mark.parametrize("scale", ["k_scale", "output_scale"])
def test_scales_of_the_cache_say_nothing_of_the_weight(tmp_path: Path, scale: str) -> None:
    tensors = {
        "a.k_proj.weight": torch.ones(4, 8).to(torch.float8_e4m3fn),
        "a.k_proj.weight_scale_inv": torch.full((1, 1), 0.5),
        f"a.k_proj.{scale}": torch.ones(1),
    }
    checkpoint = folder_of(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    (linear,) = quantized_linears(checkpoint, checkpoint.names)
    # nothing is left over to be loaded beside it
    assert set(linear.tensors) == set(tensors)
    assert torch.equal(linear.dequantize(torch.float16), torch.full((4, 8), 0.5, dtype=torch.float16))
    other = {name.replace("k_proj", "o_proj"): tensor for name, tensor in tensors.items()}
    checkpoint = folder_of(tmp_path, other, quant_method="fp8", weight_block_size=[128, 128])
    with pytest.raises(mc.CheckpointError, match=rf"a\.o_proj\.{scale}"):
        list(quantized_linears(checkpoint, checkpoint.names))


def test_tensors_that_fit_no_shape_are_refused(tmp_path: Path) -> None:
    tensors = {"a.b.weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "a.b.weight_scale_inv": torch.ones(2, 1)}
    checkpoint = folder_of(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    expected = r"a\.b\.weight_scale_inv .*\[2, 1\]"
    with pytest.raises(mc.CheckpointError, match=expected):
        list(quantized_linears(checkpoint, checkpoint.names))


def test_a_weight_that_no_format_reads_is_refused(tmp_path: Path) -> None:
    tensors = {"a.b.weight": torch.ones(4, 8, dtype=torch.uint8), "a.b.absmax": torch.ones(2)}
    checkpoint = folder_of(tmp_path, tensors, quant_method="bitsandbytes")
    with pytest.raises(mc.CheckpointError, match=r"a\.b"):
        list(quantized_linears(checkpoint, checkpoint.names))


def test_a_tensor_whose_type_torch_has_not_is_refused(tmp_path: Path) -> None:
    checkpoint = folder_of(tmp_path, {"a.weight": torch.ones(2, 2)}, quant_method="gptq")
    header = {"a.weight": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, b"\0\0"))
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(mc.CheckpointError, match=r"\ba .*format|a\.weight"):
        list(quantized_linears(checkpoint, checkpoint.names))
