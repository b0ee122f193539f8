"""What SGLang reads as w8a8_fp8, and what of it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.quant_key import kFp8DynamicTokenSym, kFp8StaticChannelSym
from moe_core.testing.checkpoints import (
    PER_CHANNEL,
    PREFIX,
    Experts,
    N,
    check,
    int8_codes,
    reason_against,
    refused,
    source,
)
from moe_fp8.formats.w8a8_fp8 import SglangFp8Format

CONFIG: dict[str, Any] = {"quant_method": "w8a8_fp8"}


def experts() -> Experts:
    return Experts(PER_CHANNEL)


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"is_dynamic": True, "ignore": ["lm_head"], "packed_modules_mapping": {"model": {"qkv_proj": ["q_proj"]}}},
        {"is_dynamic": False, "ignore": None},
        {"activation_scheme": "dynamic"},
        {"quant_description": {f"{PREFIX}.0.up_proj.weight": "FP8_PER_CHANNEL", "lm_head.weight": "FLOAT"}},
    ],
    ids=["nothing", "dynamic", "not dynamic", "scheme", "description"],
)
def test_channels_with_tokens(tmp_path: Path, stated: dict[str, Any]) -> None:
    found = source(tmp_path, experts().tensors(), {**CONFIG, **stated})
    assert found.format.name == "SGLang W8A8 FP8"
    check(found, experts(), kFp8StaticChannelSym, kFp8DynamicTokenSym)


def test_scales_in_the_models_type(tmp_path: Path) -> None:
    found = source(tmp_path, experts().tensors(torch.Tensor.bfloat16), CONFIG)
    check(found, experts(), kFp8StaticChannelSym, kFp8DynamicTokenSym)


def test_scales_of_a_tensor_are_none_of_channels(tmp_path: Path) -> None:
    tensors = experts().tensors(lambda scale: scale[0])
    refused(tmp_path, tensors, CONFIG, f"{PREFIX}.0.gate_proj.weight_scale has shape [1], expected [{N}, 1]")


def test_weights_that_are_int8(tmp_path: Path) -> None:
    tensors = Experts(PER_CHANNEL, make=int8_codes).tensors()
    refused(tmp_path, tensors, CONFIG, "weight has dtype int8, expected float8_e4m3fn")


def test_static_activations(tmp_path: Path) -> None:
    config = {**CONFIG, "activation_scheme": "static"}
    reason = reason_against(SglangFp8Format(), tmp_path, experts().tensors(), config)
    assert reason == "activation_scheme is 'static', expected 'dynamic'"


def test_entries_of_another_tool(tmp_path: Path) -> None:
    """compressed-tensors' config_groups say what this name leaves no choice of."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    message = "an entry of compressed-tensors or modelopt, but config.json: quantization_config.quant_method is 'w8a8_"
    refused(tmp_path, experts().tensors(), {**CONFIG, "config_groups": groups}, message)
