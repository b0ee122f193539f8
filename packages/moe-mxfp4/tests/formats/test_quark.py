"""Quark's MXFP4 with every kind of activations, also of gpt-oss, whose rows Quark leaves in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicDown,
    kMxfp4DynamicEven,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
)
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_mxfp4.formats.quark import QuarkMxfp4Format
from moe_mxfp4_pairs import GPT_OSS, SIZES, Experts, check, plain


def spec(dtype: str, qscheme: str, **changes: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": True, "ch_axis": -1, "symmetric": None, **changes}


MX = {"group_size": 32, "scale_format": "e8m0", "scale_calculation_mode": "even"}
WEIGHT = spec("fp4", "per_group", **MX, is_dynamic=False)
STATIC = spec("fp8_e4m3", "per_tensor", is_dynamic=False)


def config(inputs: Any = None, weight: Any = WEIGHT, **changes: Any) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, **changes}
    return {
        "quant_method": "quark",
        "global_quant_config": layer,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }


INPUTS: dict[str, tuple[dict[str, Any] | None, QuantKey | None]] = {
    "none": (None, None),
    "mxfp4": (spec("fp4", "per_group", **MX), kMxfp4DynamicEven),
    "mxfp4, older": (spec("fp4", "per_group", **{**MX, "scale_calculation_mode": None}), kMxfp4DynamicEven),
    "mxfp4 by floor": (spec("fp4", "per_group", **{**MX, "scale_calculation_mode": "floor"}), kMxfp4DynamicDown),
    "mxfp8": (spec("fp8_e4m3", "per_group", **MX), kMxfp8DynamicEven),
    "mxfp8 by floor": (spec("fp8_e4m3", "per_group", **{**MX, "scale_calculation_mode": "floor"}), kMxfp8DynamicDown),
    "static": (STATIC, kFp8StaticTensorSym),
    "token": (spec("fp8_e4m3", "per_token"), kFp8DynamicTokenSym),
    "channel": (spec("fp8_e4m3", "per_channel"), kFp8DynamicTokenSym),
    "groups": (spec("fp8_e4m3", "per_group", group_size=128), kFp8Dynamic128Sym),
}


@pytest.mark.parametrize("name", INPUTS)
def test_activations(tmp_path: Path, name: str) -> None:
    inputs, key = INPUTS[name]
    experts = Experts()
    extra = {"input_scale": torch.tensor(2.0)} if name == "static" else None
    check(source(tmp_path, experts.tensors(plain, extra), config(inputs), **SIZES), experts, key)


@pytest.mark.parametrize("inputs", [None, STATIC], ids=["16 bits", "static"])
def test_gpt_oss(tmp_path: Path, inputs: Any) -> None:
    experts = Experts(bias=True)
    extra = None if inputs is None else {"input_scale": torch.tensor(2.0)}
    found = source(tmp_path, experts.together(plain, extra), config(inputs), **GPT_OSS)
    check(found, experts, None if inputs is None else kFp8StaticTensorSym)
    if inputs is not None:
        assert found.weights().w13_input_scale is not None


def test_gate_rows_first_in_other_models(tmp_path: Path) -> None:
    """One matrix of gate and up is in turns in gpt-oss alone."""
    experts = Experts()
    tensors = {}
    for expert, one in enumerate(experts.matrices):
        gate, up, down = (plain(one[n]) for n in ("gate", "up", "down"))
        for suffix, tensor in gate.items():
            tensors[f"{PREFIX}.{expert}.gate_up_proj.{suffix}"] = torch.cat([tensor, up[suffix]])
            tensors[f"{PREFIX}.{expert}.down_proj.{suffix}"] = down[suffix]
    check(source(tmp_path, tensors, config(), **SIZES), experts)


def test_layer_configs_win(tmp_path: Path) -> None:
    experts = Experts()
    other = {"weight": spec("int8", "per_channel", is_dynamic=False), "input_tensors": None}
    layers = {"*self_attn*": other, "*mlp.experts*": {"weight": WEIGHT, "input_tensors": None}}
    quantization = {**config(), "global_quant_config": other, "layer_quant_config": layers}
    check(source(tmp_path, experts.tensors(plain), quantization, **SIZES), experts)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "fp8"}, "quant_method is 'fp8', expected 'quark'"),
    "fp6": (config(weight={**WEIGHT, "dtype": "fp6_e2m3"}), "dtype is 'fp6_e2m3', expected 'fp4'"),
    "groups": (config(weight={**WEIGHT, "group_size": 16}), "fp4 per_group of 16 with e8m0 scales, expected per_group"),
    "scales": (
        config(weight={**WEIGHT, "scale_format": "float32"}),
        "of 32 with float32 scales, expected per_group of",
    ),
    "dynamic": (config(weight={**WEIGHT, "is_dynamic": True}), "weight is dynamic, expected static"),
    "no weight": (config(weight=None), "weight is null"),
    "outputs": (config(output_tensors=STATIC), "output_tensors are quantized, expected null"),
    "fp6 inputs": (
        config(spec("fp6_e2m3", "per_group", **MX)),
        "input_tensors is dynamic fp6_e2m3 per_group of 32 with e8m0 scales, expected fp4 or fp8_e4m3",
    ),
    "another rounding": (
        config(spec("fp4", "per_group", **{**MX, "scale_calculation_mode": "ceil"})),
        "input_tensors: scale_calculation_mode is 'ceil', expected 'even' or 'floor'",
    ),
    "int8 inputs": (config(spec("int8", "per_tensor")), "input_tensors is dynamic int8 per_tensor, expected"),
    "static groups": (config(spec("fp4", "per_group", **{**MX, "is_dynamic": False})), "is static fp4 per_group of 32"),
    "inputs by tensor": (config(spec("fp8_e4m3", "per_tensor")), "is dynamic fp8_e4m3 per_tensor, expected"),
    "no config": ({"quant_method": "quark"}, "global_quant_config is None, expected an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(QuarkMxfp4Format(), tmp_path, Experts().tensors(plain), quantization)


def test_experts_that_quark_left_alone(tmp_path: Path) -> None:
    """It does so silently where it doesn't know the module, and its config says that they are quantized."""
    tensors = {
        f"{PREFIX}.gate_up_proj": torch.zeros(3, 128, 96).bfloat16(),
        f"{PREFIX}.down_proj": torch.zeros(3, 96, 64).bfloat16(),
    }
    message = f"{PREFIX} is not quantized: its weights are BF16 without scales, although config.json specifies"
    refused(tmp_path, tensors, config(INPUTS["mxfp4"][0]), message, **SIZES)
