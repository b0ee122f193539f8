"""What the formats read, for the fuzzer."""

from __future__ import annotations

from typing import Any

from moe_core.testing.checkpoints import CONFIG, MX, PER_CHANNEL, PER_TENSOR, Experts, Group, exponents
from moe_kit.fuzz import Folder, FuzzTests
from torch import Tensor

FLOAT8 = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
E4M3 = {"dtype": "fp8_e4m3", "is_dynamic": False}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**FLOAT8, **weights}, "input_activations": inputs}
    other = {"targets": ["re:.*attn.*"], "weights": FLOAT8, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group, "group_1": other}}


FORMATS: dict[str, tuple[Group, dict[str, Any]]] = {
    "fp8 block": ((128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}),
    "fp8 tensor": (PER_TENSOR, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "channel x token": (
        PER_CHANNEL,
        compressed({"strategy": "channel"}, {**FLOAT8, "strategy": "token", "dynamic": True}),
    ),
    "blocks": ((128, 128), compressed({"strategy": "block", "block_structure": [128, 128]}, None)),
    "mixed": (
        (128, 128),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.0": {"quant_algo": "FP8_PB_WO", "group_size": 128}},
        },
    ),
    "mxfp8": (MX, {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}),
    "auto-round": (
        MX,
        {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 8, "act_bits": 8, "act_data_type": "mx_fp"},
    ),
    "sglang": (PER_CHANNEL, {"quant_method": "w8a8_fp8", "is_dynamic": False, "ignore": ["re:visual.*"]}),
    "quark": (
        PER_CHANNEL,
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {**E4M3, "qscheme": "per_channel"},
                "input_tensors": {**E4M3, "qscheme": "per_token", "is_dynamic": True},
            },
            "layer_quant_config": {"*attn*": {"weight": None}},
        },
    ),
}


def tensors_of(group: Group) -> dict[str, Tensor]:
    def store(scale: Tensor) -> Tensor:
        return exponents(scale) if group == MX else scale.reshape(()) if group == PER_TENSOR else scale

    return Experts(group, hidden=160, inter=96).tensors(store)


SIZES = {"hidden_size": 160, "moe_intermediate_size": 96}


def folder(name: str) -> Folder:
    group, quantization = FORMATS[name]
    config = {**CONFIG, **SIZES, "quantization_config": quantization}
    return Folder(lambda: tensors_of(group), config, shards=2 * (name == "blocks"))


class TestFuzz(FuzzTests):
    folders = {name: folder(name) for name in FORMATS}
