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
from moe_core_quantized import CONFIG
from moe_core_words import (
    SIZES,
    Codes,
    Matrix,
    Tensors,
    auto_round,
    awq,
    gptq,
    row_pairs,
    signed_bytes,
    signed_pairs,
    words_and_order,
    words_and_zeros,
)
from torch import Tensor

ZERO = {"symmetric": False, "low": 1}
FP8 = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}


def compressed(inputs: Any = None, **changes: Any) -> dict[str, Any]:
    weights = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True, **changes}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    other = {"targets": ["re:.*attn.*"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group, "group_1": other},
    }


def smoothed(matrix: Matrix, bits: int) -> Tensors:
    return {**row_pairs(matrix, bits), "pre_quant_scale": torch.ones(matrix.q.shape[1])}


GROUPS = {"bits": 4, "group_size": 32}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Matrix, int], Tensors], dict[str, Any]]] = {
    "gptq": (
        {"order": True},
        gptq,
        {
            "quant_method": "gptq",
            **GROUPS,
            "sym": True,
            "desc_act": True,
            "checkpoint_format": "gptq",
            "dynamic": {"-:.*gate": {}, "+:.*experts.*": {"bits": 4}},
            "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        },
    ),
    "gptq asym": (ZERO, gptq, {"quant_method": "gptq", **GROUPS, "sym": False}),
    "awq": (ZERO, awq, {"quant_method": "awq", **GROUPS, "version": "gemm", "zero_point": True}),
    "auto-round": (
        {"signed": True},
        auto_round,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            **GROUPS,
            "sym": True,
            "data_type": "int",
            "extra_config": {".*experts.*": {"bits": 4}, "lm_head": {"bits": 16}},
        },
    ),
    "packed": ({"symmetric": False}, words_and_zeros, compressed(symmetric=False)),
    "ordered": ({"order": True}, words_and_order, compressed(actorder="group")),
    "fp8": ({}, signed_bytes, compressed(FP8)),
    "pairs": ({}, signed_pairs, compressed(FP8)),
    "modelopt": ({}, smoothed, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}),
}


def tensors_of(name: str) -> Tensors:
    arguments, writer, _ = FORMATS[name]
    return Codes(**arguments).tensors(writer)


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
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn)
    shapes = ((), (1,), (0,), (0, 0), (48,), (48, 1), (1, 48), (96,), (48, 96), (48, 3), (3, 48), (12, 48), None, None)
    rng = random.Random(name)
    for number in range(24):
        end = rng.choice(("gate_proj", "up_proj", "down_proj")) + "." + rng.choice(suffixes)
        shape, dtype, filling = rng.choice(shapes), rng.choice((*dtypes, None)), rng.choice((0, 1, -100))

        def other(tensor: Tensor, shape: Any = shape, dtype: Any = dtype, filling: int = filling) -> Tensor:
            made = torch.full(tensor.shape if shape is None else shape, float(filling))
            return made.to(dtype or tensor.dtype)

        tensors = {n: other(t) if n.endswith(end) else t.clone() for n, t in original.items()}
        quantization = FORMATS[name][2]
        folder = write(tmp_path / str(number), tensors, {**CONFIG, **SIZES, "quantization_config": quantization})
        read(Checkpoint.open(folder))
