"""What the formats read, for the fuzzer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from moe_core.testing.checkpoints import CONFIG
from moe_kit.fuzz import Folder, FuzzTests
from moe_wna16_words import (
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
    "gptq asym": (
        ZERO,
        gptq,
        {"quant_method": "gptq", **GROUPS, "sym": False, "checkpoint_format": "gptq", "format": "gptq"},
    ),
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


def folder(name: str) -> Folder:
    return Folder(lambda: tensors_of(name), {**CONFIG, **SIZES, "quantization_config": FORMATS[name][2]})


#: gpt-oss of GPTQModel: gate and up rows in turns in one matrix, biases
GPT_OSS = Folder(
    lambda: Codes(**ZERO).in_turns(gptq),
    {
        "model_type": "gpt_oss",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "hidden_size": SIZES["hidden_size"],
        "intermediate_size": SIZES["moe_intermediate_size"],
        "swiglu_limit": 7.0,
        "quantization_config": {**FORMATS["gptq asym"][2], "desc_act": False},
    },
)


class TestFuzz(FuzzTests):
    folders = {**{name: folder(name) for name in FORMATS}, "gpt-oss": GPT_OSS}
