"""What the formats read, for the fuzzer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_core.testing.checkpoints import CONFIG
from moe_kit.fuzz import Folder, FuzzTests
from moe_mxfp4_pairs import GPT_OSS, SIZES, Experts, packed, plain
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


class TestFuzz(FuzzTests):
    folders = {
        name: Folder(make, {**CONFIG, **sizes, "quantization_config": quantization})
        for name, (make, sizes, quantization) in FORMATS.items()
    }
