"""What the formats read, for the fuzzer."""

from __future__ import annotations

from typing import Any

import torch
from moe_core.testing.checkpoints import CONFIG, PER_CHANNEL, Experts, int4_codes, int8_codes
from moe_kit.fuzz import Folder, FuzzTests
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
    "sglang": (8, {}, {"quant_method": "w8a8_int8", "is_dynamic": True, "ignore": ["lm_head"]}),
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


def folder(name: str) -> Folder:
    return Folder(lambda: tensors_of(name), {**CONFIG, **SIZES, "quantization_config": FORMATS[name][2]})


class TestFuzz(FuzzTests):
    folders = {name: folder(name) for name in FORMATS}
