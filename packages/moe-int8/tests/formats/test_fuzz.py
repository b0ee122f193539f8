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
from moe_core_quantized import CONFIG, PER_CHANNEL, Experts, int4_codes, int8_codes
from torch import Tensor

INT8 = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
QUARK = {"dtype": "int8", "symmetric": True, "is_dynamic": False}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**INT8, **weights}, "input_activations": inputs}
    other = {"targets": ["re:.*attn.*"], "weights": INT8, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group, "group_1": other},
    }


TOKEN = {**INT8, "strategy": "token", "dynamic": True}
STATIC = {"input_scale": torch.tensor(0.5), "input_zero_point": torch.tensor(3)}
FORMATS: dict[str, tuple[int, dict[str, Tensor], dict[str, Any]]] = {
    "w8a8": (8, {}, compressed({"strategy": "channel"}, TOKEN)),
    "w8a16": (8, {}, compressed({"strategy": "channel"}, None)),
    "w4a8": (4, {}, compressed({"strategy": "group", "group_size": 32, "num_bits": 4}, TOKEN)),
    "modelopt": (
        8,
        {"input_scale": torch.tensor(0.5)},
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
    ),
    "quark": (
        8,
        STATIC,
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {**QUARK, "qscheme": "per_channel", "ch_axis": 0},
                "input_tensors": {**QUARK, "qscheme": "per_tensor", "symmetric": False},
            },
            "layer_quant_config": {"*attn*": {"weight": None}},
        },
    ),
}


def tensors_of(name: str) -> dict[str, Tensor]:
    bits, extra, _ = FORMATS[name]
    group, make = (PER_CHANNEL, int8_codes) if bits == 8 else ((1, 32), int4_codes)
    return Experts(group, hidden=128, inter=64, make=make).tensors(extra=extra)


@pytest.mark.filterwarnings("ignore::moe_core.errors.CheckpointWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_configs(tmp_path: Path, name: str) -> None:
    quantization = FORMATS[name][2]
    checkpoint = Checkpoint.open(write(tmp_path, tensors_of(name), {**CONFIG, **SIZES}))
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
    original = tensors_of(name)
    suffixes = sorted({n.rpartition(".")[2] for n in original})
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.float64, torch.float8_e4m3fn)
    shapes = ((), (1,), (0,), (0, 0), (64,), (64, 1), (1, 64), (1, 1), (64, 128), (128, 64), (64, 4), None)
    rng = random.Random(name)
    for number in range(16):
        end = rng.choice(("gate_proj", "up_proj", "down_proj")) + "." + rng.choice(suffixes)
        shape, dtype, filling = rng.choice(shapes), rng.choice((*dtypes, None)), rng.choice((0, 1, -100))

        def other(tensor: Tensor, shape: Any = shape, dtype: Any = dtype, filling: int = filling) -> Tensor:
            made = torch.full(tensor.shape if shape is None else shape, float(filling))
            return made.to(dtype or tensor.dtype)

        tensors = {n: other(t) if n.endswith(end) else t.clone() for n, t in original.items()}
        folder = write(tmp_path / str(number), tensors, {**CONFIG, **SIZES, "quantization_config": FORMATS[name][2]})
        read(Checkpoint.open(folder))
