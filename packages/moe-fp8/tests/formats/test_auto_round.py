"""AutoRound's FP8: what its scales and its activations are is told by the sizes of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey
from moe_core.spec.quant_key import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from moe_core.testing.checkpoints import PER_CHANNEL, PER_TENSOR, Experts, check, refused, source
from torch import Tensor

SETTINGS: dict[str, Any] = {"quant_method": "auto-round", "data_type": "fp", "bits": 8, "fmt": "e4m3", "sym": True}
BLOCK = {"group_size": [128, 128], "weight_block_size": [128, 128]}
DYNAMIC = {"act_bits": 8, "act_data_type": "fp", "act_dynamic": True}
STATIC = {"act_bits": 8, "act_group_size": 0, "act_dynamic": False, "activation_scheme": "static"}
CASES: dict[str, tuple[dict[str, Any], QuantKey, QuantKey | None]] = {
    "FP8_BLOCK": ({**BLOCK, **DYNAMIC, "act_group_size": 128}, kFp8Static128BlockSym, kFp8Dynamic128Sym),
    "FP8_STATIC": ({**STATIC, "group_size": -1}, kFp8StaticChannelSym, kFp8StaticTensorSym),
    "FPW8A16": ({"group_size": 0}, kFp8StaticTensorSym, None),
    "static, per tensor": ({**STATIC, "group_size": 0}, kFp8StaticTensorSym, kFp8StaticTensorSym),
    "per token": ({**DYNAMIC, "group_size": -1, "act_group_size": -1}, kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "one scale": ({**DYNAMIC, "group_size": 0, "act_group_size": 0}, kFp8StaticTensorSym, kFp8DynamicTensorSym),
    "experts apart": (
        {"group_size": 32, "bits": 4, "extra_config": {"experts": {"bits": 8, "group_size": -1}}},
        kFp8StaticChannelSym,
        None,
    ),
}


def tensors_of(key: QuantKey, static: bool, experts: Experts) -> dict[str, Tensor]:
    """[1], [N], [N / 128, K / 128]."""
    extra = {"input_scale": torch.tensor([0.5])} if static else None
    if key == kFp8Static128BlockSym:
        return experts.tensors(lambda scale: scale, "weight_scale_inv", extra=extra)
    return experts.tensors(lambda scale: scale.flatten(), extra=extra)


def experts_of(key: QuantKey) -> Experts:
    groups = {kFp8StaticTensorSym: PER_TENSOR, kFp8StaticChannelSym: PER_CHANNEL}
    return Experts(groups.get(key, (128, 128)))


@pytest.mark.parametrize("name", CASES)
def test_settings(tmp_path: Path, name: str) -> None:
    settings, weight_key, activation_key = CASES[name]
    experts = experts_of(weight_key)
    tensors = tensors_of(weight_key, activation_key == kFp8StaticTensorSym, experts)
    check(source(tmp_path, tensors, {**SETTINGS, **settings}), experts, weight_key, activation_key)


#: of the router, which every MoE leaves in 16 bits
ROUTER = {"model.layers.0.mlp.gate": {"act_bits": 16, "act_data_type": "float", "bits": 16, "data_type": "float"}}


@pytest.mark.parametrize("version", [{"autoround_version": "0.16.1"}, {}], ids=["version", "none"])
@pytest.mark.parametrize("extra", [{"extra_config": ROUTER}, {}], ids=["router", "nothing"])
@pytest.mark.parametrize("name", CASES)
def test_settings_in_the_form_of_fp8(tmp_path: Path, name: str, extra: dict[str, Any], version: dict[str, str]) -> None:
    settings, weight_key, activation_key = CASES[name]
    experts = experts_of(weight_key)
    tensors = tensors_of(weight_key, activation_key == kFp8StaticTensorSym, experts)
    quantization = {**SETTINGS, **extra, **settings, **version, "quant_method": "fp8"}
    check(source(tmp_path, tensors, quantization), experts, weight_key, activation_key)


def test_settings_of_some_layers_in_the_form_of_fp8(tmp_path: Path) -> None:
    """Activations of the experts stay in 16 bits."""
    settings, weight_key, _ = CASES["FP8_BLOCK"]
    experts = experts_of(weight_key)
    quantization = {**SETTINGS, **settings, "quant_method": "fp8", "extra_config": {"mlp.experts": {"act_bits": 16}}}
    check(source(tmp_path, tensors_of(weight_key, False, experts), quantization), experts, weight_key, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_type": "nv_fp"}, "data_type is 'nv_fp' with 8 bits, expected fp, fp8 or fp8_e4m3 with 8"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        ({"group_size": 64}, "group_size is 64, expected 0, -1 or [rows, columns]"),
        ({"act_bits": 4}, "act_data_type is 'fp' with 4 bits, expected fp, fp8 or fp8_e4m3 with 8 or 16"),
        ({**STATIC, "act_group_size": 128}, "act_group_size is 128 of static activations, expected 0"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    experts = experts_of(kFp8StaticChannelSym)
    tensors = tensors_of(kFp8StaticChannelSym, False, experts)
    refused(tmp_path, tensors, {**SETTINGS, "group_size": -1, **change}, message)
