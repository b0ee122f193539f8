"""Weights that compressed-tensors' compressors write are read to the numbers that they decompress to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_kit.tool_models import EXPERTS, HIDDEN, E, check_weights, linear_model, save
from torch import Tensor

pytest.importorskip("compressed_tensors", "0.20", reason="the nox session `tools` installs it")

ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    **{f"{ATTENTION}.{n}_proj": (HIDDEN, HIDDEN) for n in "qo"},
    "model.layers.0.mlp.gate": (HIDDEN, E),
    **EXPERTS,
    "lm_head": (HIDDEN, 384),
}


def int_weights(bits: int, group: int | None = None, **changes: Any) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return {"type": "int", "num_bits": bits, **strategy, **changes}


FP8: dict[str, Any] = {"type": "float", "num_bits": 8, "strategy": "channel"}
MX: dict[str, Any] = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
TOKEN: dict[str, Any] = {"strategy": "token", "dynamic": True, "num_bits": 8}
#: weights, input activations, and the format that the library infers from them
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    **{
        f"int{bits} {'channel' if group is None else f'g{group}'} {'sym' if symmetric else 'asym'}": (
            int_weights(bits, group, symmetric=symmetric),
            None,
            "pack-quantized",
        )
        for bits in (4, 8)
        for group in (32, 128, None)
        for symmetric in (True, False)
    },
    "W8A8 int": (int_weights(8), {**TOKEN, "type": "int"}, "int-quantized"),
    "W8A8 fp8 channel": (FP8, {**TOKEN, "type": "float"}, "float-quantized"),
    "W8A8 fp8 tensor": ({**FP8, "strategy": "tensor"}, {**TOKEN, "type": "float"}, "float-quantized"),
    "W8A8 fp8 block": (
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        {"type": "float", "num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True},
        "float-quantized",
    ),
    "MXFP4": ({**MX, "num_bits": 4}, None, "mxfp4-pack-quantized"),
    "MXFP8": ({**MX, "num_bits": 8}, None, "mxfp8-quantized"),
}


def calibrate(module: Any) -> None:
    """Set the scales and zero points from the weight's extrema, as the simplest observer does."""
    from compressed_tensors.quantization.utils import calculate_qparams

    args = module.quantization_scheme.weights
    weight = module.weight.detach()
    rows, cols = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        parts = weight.unflatten(1, (cols // wide, wide)).unflatten(0, (rows // high, high)).transpose(1, 2).flatten(2)
    elif args.strategy == "tensor":
        parts = weight.flatten()[None]
    else:
        parts = weight.unflatten(1, (-1, args.group_size or cols))
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    module.weight_scale.data = scale.view(module.weight_scale.shape).to(module.weight_scale.dtype)
    if hasattr(module, "weight_zero_point"):
        found = module.weight_zero_point
        found.data = zero.float().round().view(found.shape).to(found.dtype)


def compressed(folder: Path, groups: dict[str, Any], ignore: list[str]) -> dict[str, Tensor]:
    """Write a compressed model as the library does and return the weights that it decompresses, by module.

    The library multiplies in bfloat16, which rounds exact products of codes and scales.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    tiny: Any = linear_model(SHAPES, torch.bfloat16)
    apply_quantization_config(tiny, QuantizationConfig(config_groups=groups, ignore=ignore), show_progress=False)
    quantized = [name for name, module in tiny.named_modules() if hasattr(module, "quantization_scheme")]
    for name in quantized:
        calibrate(tiny.get_submodule(name))
    compressor = ModelCompressor.from_pretrained_model(tiny)
    compressor.compress_model(tiny)
    save(folder, tiny)
    compressor.update_config(str(folder))
    compressor.decompress_model(tiny)
    return {name: tiny.get_submodule(name).weight.detach() for name in quantized}


@pytest.mark.parametrize("name", CASES)
def test_weights(tmp_path: Path, name: str) -> None:
    weights, inputs, layout = CASES[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    expected = compressed(tmp_path, {"group_0": group}, ["lm_head", "re:.*mlp.gate$"])
    assert len(expected) == 2 + 3 * E
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["config_groups"]["group_0"]["format"] == layout
    check_weights(tmp_path, expected, torch.bfloat16)


MIXED: dict[str, dict[str, Any]] = {
    "attention in 8 bits": {
        "group_0": {"targets": ["Linear"], "weights": int_weights(4, 128, symmetric=False)},
        "group_1": {"targets": ["re:.*self_attn.*"], "weights": FP8, "input_activations": {**TOKEN, "type": "float"}},
    },
    "experts in MXFP4": {
        "group_0": {"targets": [r"re:.*experts\..*"], "weights": {**MX, "num_bits": 4}},
        "group_1": {"targets": ["Linear", f"{ATTENTION}.q_proj"], "weights": int_weights(8)},
    },
}


@pytest.mark.parametrize("name", MIXED)
def test_several_groups(tmp_path: Path, name: str) -> None:
    expected = compressed(tmp_path, MIXED[name], ["re:.*mlp.gate$"])
    check_weights(tmp_path, expected, torch.bfloat16)
