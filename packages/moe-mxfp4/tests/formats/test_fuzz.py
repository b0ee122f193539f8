"""Configs and tensors with something changed: a MoEError, or weights that fit their keys, never anything else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.checkpoint import Checkpoint
from moe_core_checkpoints import write
from moe_core_fuzz import changed, read
from moe_core_pairs import GPT_OSS, SIZES, Experts, packed, plain
from moe_core_quantized import CONFIG
from torch import Tensor

Tensors = dict[str, Tensor]

MX = {"type": "float", "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
TOKEN = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(inputs: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**MX, "dynamic": False}, "input_activations": inputs}
    other = {"targets": ["re:.*attn.*"], "weights": MX, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group, "group_1": other},
    }


QUARK = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
STATIC = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
SCALE = {"input_scale": torch.tensor(0.5)}
FORMATS: dict[str, tuple[Callable[[], Tensors], dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": (
        lambda: Experts(bias=True).gpt_oss(),
        GPT_OSS,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]},
    ),
    "compressed-tensors": (lambda: Experts().tensors(packed), SIZES, compressed(TOKEN)),
    "MXFP4 activations": (lambda: Experts().tensors(packed), SIZES, compressed({**MX, "dynamic": True})),
    "Quark": (
        lambda: Experts(bias=True).together(plain, SCALE),
        GPT_OSS,
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": QUARK, "input_tensors": STATIC, "output_tensors": None},
            "layer_quant_config": {"*self_attn*": {"weight": STATIC}},
            "exclude": ["lm_head"],
        },
    ),
    "ModelOpt": (
        lambda: Experts().tensors(plain, SCALE),
        SIZES,
        {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8", "group_size": 32, "ignore": ["lm_head"]},
    ),
    "AutoRound": (
        lambda: Experts(bias=True).tensors(packed),
        SIZES,
        {
            "quant_method": "auto-round",
            "data_type": "mx_fp",
            "bits": 4,
            "group_size": 32,
            "act_bits": 8,
            "act_data_type": "mx_fp_rceil",
            "extra_config": {".*experts.*": {"bits": 4}, "lm_head": {"bits": 16}},
        },
    ),
}


@pytest.mark.filterwarnings("ignore::moe_core.errors.CheckpointWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_configs(tmp_path: Path, name: str) -> None:
    make, sizes, quantization = FORMATS[name]
    checkpoint = Checkpoint.open(write(tmp_path, make(), {**CONFIG, **sizes}))
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
    make, sizes, quantization = FORMATS[name]
    original = make()
    ends = sorted({n.rpartition(".experts.")[2].lstrip("0123456789.") for n in original})
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.int64, torch.float8_e4m3fn)
    shapes = ((), (1,), (0,), (0, 0), (64,), (64, 48), (96, 32), (3, 64), (3, 96, 2), (3, 96, 2, 16), None, None)
    rng = random.Random(name)
    for number in range(24):
        end = rng.choice(ends)
        shape, dtype, filling = rng.choice(shapes), rng.choice((*dtypes, None)), rng.choice((0, 1, 255, -100))

        def other(tensor: Tensor, shape: Any = shape, dtype: Any = dtype, filling: int = filling) -> Tensor:
            made = torch.full(tensor.shape if shape is None else shape, float(filling))
            return made.to(dtype or tensor.dtype)

        tensors = {n: other(t) if n.endswith(end) else t.clone() for n, t in original.items()}
        folder = write(tmp_path / str(number), tensors, {**CONFIG, **sizes, "quantization_config": quantization})
        read(Checkpoint.open(folder))
