"""What SGLang reads as w8a8_fp8 and w8a8_int8, and what of it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey, kFp8DynamicTokenSym, kFp8StaticChannelSym, kInt8DynamicTokenSym, kInt8StaticChannelSym
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
from moe_int8.formats.w8a8_int8 import SglangInt8Format

FP8, INT8 = Experts(PER_CHANNEL), Experts(PER_CHANNEL, make=int8_codes)


@dataclass(frozen=True)
class Method:
    """A ``quant_method``, the format that reads it, its experts and keys, and those of the other method."""

    name: str
    format: Any
    experts: Experts
    keys: tuple[QuantKey, QuantKey]
    others: Experts
    refusal: str

    @property
    def config(self) -> dict[str, Any]:
        return {"quant_method": self.name}


METHODS = (
    Method(
        "w8a8_fp8",
        SglangFp8Format(),
        FP8,
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        INT8,
        "weight has dtype int8, expected float8_e4m3fn",
    ),
    Method(
        "w8a8_int8",
        SglangInt8Format(),
        INT8,
        (kInt8StaticChannelSym, kInt8DynamicTokenSym),
        FP8,
        "weight has dtype float8_e4m3fn, expected int8",
    ),
)
pytestmark = pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])


@pytest.mark.parametrize(
    "stated",
    [
        {},
        {"is_dynamic": True, "ignore": ["lm_head"], "packed_modules_mapping": {"model": {"qkv_proj": ["q_proj"]}}},
        {"is_dynamic": False, "ignore": None},
        {"activation_scheme": "dynamic"},
        {"quant_description": {f"{PREFIX}.0.up_proj.weight": "PER_CHANNEL", "lm_head.weight": "FLOAT"}},
    ],
    ids=["nothing", "dynamic", "not dynamic", "scheme", "description"],
)
def test_channels_with_tokens(tmp_path: Path, method: Method, stated: dict[str, Any]) -> None:
    found = source(tmp_path, method.experts.tensors(), {**method.config, **stated})
    assert found.format.name == method.format.name
    check(found, method.experts, *method.keys)


def test_scales_in_the_models_type(tmp_path: Path, method: Method) -> None:
    found = source(tmp_path, method.experts.tensors(torch.Tensor.bfloat16), method.config)
    check(found, method.experts, *method.keys)


def test_scales_of_a_tensor_are_none_of_channels(tmp_path: Path, method: Method) -> None:
    tensors = method.experts.tensors(lambda scale: scale[0])
    refused(tmp_path, tensors, method.config, f"{PREFIX}.0.gate_proj.weight_scale has shape [1], expected [{N}, 1]")


def test_weights_of_the_other_method(tmp_path: Path, method: Method) -> None:
    refused(tmp_path, method.others.tensors(), method.config, method.refusal)


def test_offsets_of_ascends_tools(tmp_path: Path, method: Method) -> None:
    tensors = method.experts.tensors(extra={"input_offset": torch.zeros(1)})
    refused(tmp_path, tensors, method.config, f"{PREFIX}.0.gate_proj.input_offset is F32")


def test_static_activations(tmp_path: Path, method: Method) -> None:
    config = {**method.config, "activation_scheme": "static"}
    reason = reason_against(method.format, tmp_path, method.experts.tensors(), config)
    assert reason == "activation_scheme is 'static', expected 'dynamic'"


def test_entries_of_another_tool(tmp_path: Path, method: Method) -> None:
    """compressed-tensors' config_groups say what this name leaves no choice of."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
    message = "an entry of compressed-tensors or modelopt, but config.json: quantization_config.quant_method is 'w8a8_"
    refused(tmp_path, method.experts.tensors(), {**method.config, "config_groups": groups}, message)
