"""Configs and tensors with something changed: a MoEError, or weights that fit their keys, never anything else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.checkpoint import Checkpoint
from moe_core_checkpoints import write
from moe_core_fuzz import changed, read
from moe_core_quantized import CONFIG, MX, PER_CHANNEL, PER_TENSOR, Experts, Group, exponents
from torch import Tensor

FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
E4M3 = {"dtype": "fp8_e4m3", "is_dynamic": False}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**FLOAT8, **weights}, "input_activations": inputs}
    other = {"targets": ["re:.*attn.*"], "weights": FLOAT8, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group, "group_1": other}}


FORMATS: dict[str, tuple[Group, dict[str, Any]]] = {
    "fp8 block": ((128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
    "fp8 tensor": (PER_TENSOR, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "channel x token": (
        PER_CHANNEL,
        compressed({"strategy": "channel"}, {**FLOAT8, "strategy": "token", "dynamic": True}),
    ),
    "blocks": ((128, 128), compressed({"strategy": "block", "block_structure": [128, 128]}, None)),
    "mixed": (
        (128, 128),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0": {"quant_algo": "FP8_PB_WO", "group_size": 128}},
        },
    ),
    "mxfp8": (MX, {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}),
    "auto-round": (
        MX,
        {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8, "act_bits": 8, "act_data_type": "mx_fp"},
    ),
    "quark": (
        PER_CHANNEL,
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {**E4M3, "qscheme": "per_channel"},
                "input_tensors": {**E4M3, "qscheme": "per_token", "is_dynamic": True},
            },
            "layer_quant_config": {"*attn*": {"weight": None}},
        },
    ),
}


def tensors_of(group: Group) -> dict[str, Tensor]:
    def store(scale: Tensor) -> Tensor:
        return exponents(scale) if group == MX else scale.reshape(()) if group == PER_TENSOR else scale

    return Experts(group, hidden=160, inter=96).tensors(store)


SIZES = {"hidden_size": 160, "moe_intermediate_size": 96}


@pytest.mark.filterwarnings("ignore::moe_core.errors.CheckpointWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_configs(tmp_path: Path, name: str) -> None:
    group, quantization = FORMATS[name]
    checkpoint = Checkpoint.open(write(tmp_path, tensors_of(group), {**CONFIG, **SIZES}))
    assert read(Checkpoint(checkpoint.path, checkpoint.config, quantization, checkpoint._files))
    rng = random.Random(name)
    for _ in range(60):
        other = changed(quantization, rng)
        if isinstance(other, dict):
            read(Checkpoint(checkpoint.path, checkpoint.config, other, checkpoint._files))


@pytest.mark.filterwarnings("ignore::moe_core.errors.CheckpointWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_tensors(tmp_path: Path, name: str) -> None:
    """Of all experts, since one that differs is found before any format looks."""
    group, quantization = FORMATS[name]
    original = tensors_of(group)
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float64,
    )
    rng = random.Random(name)
    for number in range(12):
        end = rng.choice(("gate_proj", "up_proj", "down_proj")) + "." + rng.choice(("weight", "weight_scale"))
        shape = rng.choice(
            ((), (1,), (0,), (0, 0), (96,), (96, 1), (1, 1), (2, 2), (96, 160), (160, 96), (96, 5), None)
        )
        dtype = rng.choice((*dtypes, None))

        def other(tensor: Tensor, shape: Any = shape, dtype: torch.dtype | None = dtype) -> Tensor:
            made = torch.zeros(tensor.shape if shape is None else shape, dtype=dtype or tensor.dtype)
            return made.fill_(1) if dtype is not None and dtype.itemsize > 1 else made

        tensors = {n: other(t) if n.endswith(end) else t.clone() for n, t in original.items()}
        folder = write(tmp_path / str(number), tensors, {**CONFIG, **SIZES, "quantization_config": quantization})
        read(Checkpoint.open(folder))
