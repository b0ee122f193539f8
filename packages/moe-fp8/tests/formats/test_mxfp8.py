"""MXFP8 under its own name, AutoRound's, and plain FP8's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey, kMxfp8Dynamic, kMxfp8DynamicDown, kMxfp8Static
from moe_core.testing.checkpoints import MX, PREFIX, Experts, check, exponents, reason_against, refused, source
from moe_fp8.formats.mxfp8 import AutoRoundMxfp8Format, Mxfp8Format

AUTO_ROUND = {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8, "group_size": 32}
CONFIGS: dict[str, tuple[dict[str, Any], QuantKey]] = {
    "MiniMax": ({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, kMxfp8Dynamic),
    "MiniMax with blocks": (
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"},
        kMxfp8Dynamic,
    ),
    "AutoRound rounded up": (
        {**AUTO_ROUND, "act_bits": 8, "act_data_type": "mx_fp_rceil", "extra_config": {}},
        kMxfp8Dynamic,
    ),
    "AutoRound": (
        {**AUTO_ROUND, "quant_method": "intel/auto-round", "act_bits": 8, "act_data_type": "mx_fp"},
        kMxfp8DynamicDown,
    ),
    "AutoRound's other layers": (
        {**AUTO_ROUND, "act_bits": 8, "extra_config": {"lm_head": {"bits": 16}}},
        kMxfp8DynamicDown,
    ),
    "AutoRound's experts": (
        {**AUTO_ROUND, "bits": 4, "act_bits": 4, "extra_config": {"experts": {"bits": 8, "act_bits": 8}}},
        kMxfp8DynamicDown,
    ),
}


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path: Path, name: str, suffix: str) -> None:
    quantization, activation_key = CONFIGS[name]
    experts = Experts(MX)
    tensors = experts.tensors(exponents, suffix)
    check(source(tmp_path, tensors, quantization), experts, kMxfp8Static, activation_key)


@pytest.mark.parametrize("change", [{}, {"act_bits": 16}], ids=str)
def test_auto_round_without_activations(tmp_path: Path, change: dict[str, Any]) -> None:
    experts = Experts(MX)
    check(source(tmp_path, experts.tensors(exponents), {**AUTO_ROUND, **change}), experts, kMxfp8Static, None)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_plain_fp8_with_groups_of_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = Experts(MX)
    tensors = experts.tensors(lambda scale: exponents(scale, dtype), "weight_scale_inv")
    quantization = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    check(source(tmp_path, tensors, quantization), experts, kMxfp8Static, kMxfp8Dynamic)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "block": (
        {"quant_method": "mxfp8", "weight_block_size": [128, 128]},
        "weight_block_size is [128, 128], expected [1",
    ),
    "static": (
        {"quant_method": "mxfp8", "activation_scheme": "static"},
        "activation_scheme is 'static', expected 'dyn",
    ),
    "bits": ({**AUTO_ROUND, "bits": 4}, "data_type is 'mx_fp' with 4 bits, expected 'mx_fp' with 8"),
    "int": ({**AUTO_ROUND, "data_type": "int"}, "data_type is 'int' with 8 bits, expected 'mx_fp' with 8"),
    "experts in 4 bits": (
        {**AUTO_ROUND, "extra_config": {"experts": {"bits": 4}}},
        "data_type is 'mx_fp' with 4 bits, e",
    ),
    "group": ({**AUTO_ROUND, "group_size": 16}, "group_size is 16, expected 32"),
    "e5m2": ({**AUTO_ROUND, "data_type": "mx_fp8e5m2"}, "data_type is 'mx_fp8e5m2' with 8 bits, expected 'mx_fp'"),
    "groups of activations": (
        {**AUTO_ROUND, "act_bits": 8, "act_group_size": 64},
        "act_group_size is 64, expected 32",
    ),
    "static activations": (
        {**AUTO_ROUND, "act_bits": 8, "act_dynamic": False},
        "act_dynamic is false, expected true",
    ),
    "activations": ({**AUTO_ROUND, "act_bits": 4}, "act_data_type is 'mx_fp' with 4 bits, expected 'mx_fp' with 8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    adapter = Mxfp8Format() if quantization["quant_method"] == "mxfp8" else AutoRoundMxfp8Format()
    assert message in reason_against(adapter, tmp_path, Experts(MX).tensors(exponents), quantization)


def test_scales_that_are_no_exponents(tmp_path: Path) -> None:
    tensors = Experts(MX).tensors()
    name = f"{PREFIX}.0.gate_proj.weight_scale"
    refused(tmp_path, tensors, CONFIGS["MiniMax"][0], f"{name} has dtype float32, expected uint8 or float8_e8m0fnu")
