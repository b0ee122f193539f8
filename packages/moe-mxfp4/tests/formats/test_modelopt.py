"""ModelOpt's algorithms with MXFP4 weights, in any letter case and from either of its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey, kFp8DynamicTokenSym, kFp8StaticTensorSym, kMxfp4Dynamic, kMxfp8Dynamic
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.testing.checkpoints import CONFIG, PREFIX, reason_against, refused, source, write
from moe_mxfp4.formats.modelopt import ModelOptMxfp4Format
from moe_mxfp4_pairs import SIZES, Experts, check, plain

ALGORITHMS: dict[str, QuantKey | None] = {
    "mxfp4": kMxfp4Dynamic,
    "W4A8_MXFP4_FP8": kFp8StaticTensorSym,
    "w4a8_mxfp4_mxfp8": kMxfp8Dynamic,
    "W4A16_MXFP4": None,
}


def config(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head.\0x"], **changes}


@pytest.mark.parametrize("size", [{}, {"group_size": 32}, {"group_size": 0}], ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(tmp_path: Path, algorithm: str, size: dict[str, int]) -> None:
    experts = Experts()
    key = ALGORITHMS[algorithm]
    extra = {"input_scale": torch.tensor(0.25)} if key == kFp8StaticTensorSym else None
    check(source(tmp_path, experts.tensors(plain, extra), config(algorithm, **size), **SIZES), experts, key)


def test_the_file_beside_config_json(tmp_path: Path) -> None:
    experts = Experts()
    folder = write(tmp_path, experts.tensors(plain), {**CONFIG, **SIZES})
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "mxfp4", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    check(read_layer(Checkpoint.open(folder)), experts, kMxfp4Dynamic)


def test_mixed_precision(tmp_path: Path) -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        PREFIX: {"quant_algo": "W4A8_MXFP4_FP8", "group_size": 32},
    }
    experts = Experts()
    tensors = experts.tensors(plain, {"input_scale": torch.tensor(0.25)})
    found = source(tmp_path, tensors, config("MIXED_PRECISION", quantized_layers=layers), **SIZES)
    check(found, experts, kFp8StaticTensorSym)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "fp8"}, "quant_method is 'fp8', expected 'modelopt'"),
    "nvfp4": (
        config("NVFP4"),
        "quant_algo is 'NVFP4', expected MXFP4, W4A8_MXFP4_FP8, W4A8_MXFP4_MXFP8 or W4A16_MXFP4",
    ),
    "groups": (config("mxfp4", group_size=16), "group_size is 16 for MXFP4, expected 32"),
    "nothing": ({"quant_method": "modelopt"}, "quant_algo is None, expected an algorithm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(ModelOptMxfp4Format(), tmp_path, Experts().tensors(plain), quantization)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.tensor(0.0), "input_scale has 1 zero, negative, NaN or Inf value of 1"),
        (torch.ones(2), "gate_proj.input_scale has shape [2], expected [] (one scale of all activations)"),
    ],
)
def test_activation_scales(tmp_path: Path, scale: torch.Tensor, message: str) -> None:
    refused(tmp_path, Experts().tensors(plain, {"input_scale": scale}), config("W4A8_MXFP4_FP8"), message, **SIZES)


def test_no_calibration(tmp_path: Path) -> None:
    """The preset as it is writes no scales of activations."""
    experts = Experts()
    found = source(tmp_path / "a", experts.tensors(plain), config("W4A8_MXFP4_FP8"), **SIZES)
    check(found, experts, kFp8DynamicTokenSym)
    tensors = experts.tensors(plain, {"input_scale": torch.tensor(0.5)})
    some = {name: t for name, t in tensors.items() if not name.endswith("gate_proj.input_scale")}
    refused(tmp_path / "b", some, config("W4A8_MXFP4_FP8"), f"{PREFIX}.0.gate_proj.input_scale is missing in", **SIZES)


def test_scales_that_are_no_exponents(tmp_path: Path) -> None:
    """NVFP4's tensors under an algorithm of MXFP4."""
    tensors = {
        name: t.view(torch.float8_e4m3fn) if name.endswith("weight_scale") else t
        for name, t in Experts().tensors(plain).items()
    }
    message = f"{PREFIX}.0.gate_proj.weight_scale has dtype float8_e4m3fn, expected uint8 or float8_e8m0fnu"
    refused(tmp_path, tensors, config("mxfp4"), message, **SIZES)
