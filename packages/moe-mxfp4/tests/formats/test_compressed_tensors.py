"""compressed-tensors' mxfp4-pack-quantized: weights, every kind of activations, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import (
    ActivationParams,
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4DynamicEven,
    kMxfp8Dynamic,
)
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_mxfp4.formats.compressed_tensors import CompressedTensorsMxfp4Format
from moe_mxfp4_pairs import GPT_OSS, SIZES, Experts, check, packed


def args(bits: int, strategy: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "type": "float",
        "num_bits": bits,
        "symmetric": True,
        "dynamic": True,
        "strategy": strategy,
        "observer": "minmax",
        **changes,
    }


EXPONENTS = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
WEIGHTS = args(4, "group", dynamic=False, **EXPONENTS)
STATIC = args(8, "tensor", dynamic=False)


def config(
    inputs: dict[str, Any] | None = None, weights: Any = WEIGHTS, layout: str | None = "mxfp4-pack-quantized"
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


INPUTS: dict[str, tuple[dict[str, Any] | None, QuantKey | None]] = {
    "none": (None, None),
    "mxfp4": (args(4, "group", **EXPONENTS), kMxfp4DynamicEven),
    "mxfp8": (args(8, "group", **EXPONENTS), kMxfp8Dynamic),
    "groups of 128": (args(8, "group", group_size=128), kFp8Dynamic128Sym),
    "token": (args(8, "token"), kFp8DynamicTokenSym),
    "static": (STATIC, kFp8StaticTensorSym),
}


@pytest.mark.parametrize("name", INPUTS)
def test_activations(tmp_path: Path, name: str) -> None:
    inputs, key = INPUTS[name]
    experts = Experts()
    extra = {"input_scale": torch.tensor([0.5]).bfloat16()} if name == "static" else None
    found = source(tmp_path, experts.tensors(packed, extra), config(inputs), **SIZES)
    check(found, experts, key)
    scale = found.weights().w13_input_scale
    assert (scale is None) == (name != "static")
    if scale is not None:
        assert scale.tolist() == [0.5] * 3


@pytest.mark.parametrize(
    "weights",
    [
        {**WEIGHTS, "scale_dtype": None},
        {**WEIGHTS, "strategy": None},
        {**WEIGHTS, "actorder": None, "block_structure": None},
    ],
)
def test_what_configs_leave_out(tmp_path: Path, weights: dict[str, Any]) -> None:
    experts = Experts()
    check(source(tmp_path / "a", experts.tensors(packed), config(weights=weights), **SIZES), experts)
    check(source(tmp_path / "b", experts.tensors(packed), config(weights=weights, layout=None), **SIZES), experts)


def test_kimi_k3(tmp_path: Path) -> None:
    """Experts of another size than the hidden states, under a language model's entries."""
    experts = Experts()
    block, inner = PREFIX.removesuffix(".experts"), SIZES["hidden_size"]
    outer = 4 * inner
    tensors = {
        **experts.tensors(packed),
        f"{block}.gate.weight": torch.zeros(len(experts.values()[0]), outer),
        f"{block}.gate.e_score_correction_bias": torch.zeros(len(experts.values()[0])),
        f"{block}.routed_expert_down_proj.weight": torch.zeros(inner, outer),
    }
    sizes = {**SIZES, "hidden_size": outer, "routed_expert_hidden_size": inner}
    own = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    found = source(tmp_path, tensors, config(), model_type="kimi_linear", **sizes, **own)
    assert found.config.activation_params == ActivationParams(beta=4.0, limit=25.0)
    check(found, experts)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_experts(tmp_path: Path, gated: bool, bias: bool) -> None:
    experts = Experts(gated=gated, bias=bias)
    found = source(tmp_path, experts.tensors(packed), config(), **SIZES, hidden_act="silu" if gated else "relu2")
    check(found, experts)


def test_gpt_oss(tmp_path: Path) -> None:
    """Gate and up separate: no rows in turns."""
    experts = Experts(bias=True)
    check(source(tmp_path, experts.tensors(packed), config(), **GPT_OSS), experts)


def test_a_short_last_group(tmp_path: Path) -> None:
    experts = Experts(hidden=80, inter=48)
    sizes = {"hidden_size": 80, "moe_intermediate_size": 48}
    check(source(tmp_path, experts.tensors(packed), config(), **sizes), experts)


def test_a_stated_shape(tmp_path: Path) -> None:
    experts = Experts()
    tensors = experts.tensors(packed)
    shapes = {
        name.replace("weight_packed", "weight_shape"): torch.tensor([t.shape[0], 2 * t.shape[1]])
        for name, t in tensors.items()
        if name.endswith("weight_packed")
    }
    check(source(tmp_path / "a", {**tensors, **shapes}, config(), **SIZES), experts)
    name = f"{PREFIX}.1.up_proj.weight_shape"
    wrong = {**tensors, **shapes, name: torch.tensor([64, 48])}
    refused(tmp_path / "b", wrong, config(), f"{name} states [64, 48], expected [64, 96]", **SIZES)


def test_ignore_lists_are_not_believed(tmp_path: Path) -> None:
    experts = Experts()
    quantization = {**config(), "ignore": ["re:.*experts.*", "lm_head.\0model"]}
    check(source(tmp_path, experts.tensors(packed), quantization, **SIZES), experts)


def test_gate_and_up_with_different_activation_scales(tmp_path: Path) -> None:
    """Their maximum: with it neither clips."""
    tensors = Experts().tensors(packed, {"input_scale": torch.tensor([0.5])})
    tensors[f"{PREFIX}.1.up_proj.input_scale"] = torch.tensor([0.75])
    weights = source(tmp_path, tensors, config(STATIC), **SIZES).weights()
    assert weights.w13_input_scale is not None
    assert weights.w13_input_scale.tolist() == [0.5, 0.75, 0.5]


NVFP4 = args(4, "tensor_group", dynamic=False, group_size=16, scale_dtype="torch.float8_e4m3fn")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "fp8"}, "quant_method is 'fp8', expected 'compressed-tensors'"),
    "bits": (config(weights={**WEIGHTS, "num_bits": 6}), "group_0 has float6 weights, expected float4"),
    "int": (config(weights={**WEIGHTS, "type": "int"}), "group_0 has int4 weights, expected float4"),
    "nvfp4": (
        config(weights=NVFP4, layout="nvfp4-pack-quantized"),
        "format is 'nvfp4-pack-quantized', expected 'mxfp4-pack-quantized'",
    ),
    "groups": (config(weights={**WEIGHTS, "group_size": 16}), "by group 16 with torch.uint8 scales, expected groups"),
    "scales": (
        config(weights={**WEIGHTS, "scale_dtype": "torch.bfloat16"}),
        "with torch.bfloat16 scales, expected groups of 32 with torch.uint8",
    ),
    "channel": (config(weights=args(4, "channel", dynamic=False)), "static float4 by channel, expected groups of 32"),
    "asymmetric": (config(weights={**WEIGHTS, "symmetric": False}), "is asymmetric, expected symmetric and static"),
    "dynamic": (config(weights={**WEIGHTS, "dynamic": True}), "is dynamic, expected symmetric and static"),
    "int8 inputs": (config({**args(8, "token"), "type": "int"}), "dynamic int8 by token, expected symmetric float8"),
    "inputs by tensor": (config(args(8, "tensor")), "dynamic float8 by tensor, expected symmetric float8"),
    "groups of 64": (config(args(8, "group", group_size=64)), "dynamic float8 by group 64, expected symmetric"),
    "float scales of 32": (config(args(8, "group", group_size=32)), "dynamic float8 by group 32, expected symmetric"),
    "fp4 in groups of 16": (config(args(4, "group", group_size=16)), "dynamic float4 by group 16, expected symmetric"),
    "static groups": (config(args(4, "group", **{**EXPONENTS, "dynamic": False})), "static float4 by group 32, expec"),
    "local": (config(args(4, "group", **{**EXPONENTS, "dynamic": "local"})), "dynamic float4 by group 32, expected"),
    "asymmetric inputs": (config({**args(8, "token"), "symmetric": False}), "dynamic float8 by token, expected"),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups is None, expected an object with groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    tensors = Experts().tensors(packed)
    assert message in reason_against(CompressedTensorsMxfp4Format(), tmp_path, tensors, quantization)


def test_no_activation_scales(tmp_path: Path) -> None:
    message = f"{PREFIX}.0.gate_proj.input_scale is missing in"
    refused(tmp_path, Experts().tensors(packed), config(STATIC), message, **SIZES)


def test_global_scales(tmp_path: Path) -> None:
    """NVFP4's, which another config would have to explain."""
    tensors = Experts().tensors(packed, {"weight_global_scale": torch.ones(1)})
    message = f"{PREFIX}.0.gate_proj.weight_global_scale is F32"
    refused(tmp_path, tensors, config(), message, **SIZES)


def test_weights_that_were_not_compressed(tmp_path: Path) -> None:
    """16-bit weights beside their scales: quantization_status "frozen"."""
    tensors = {}
    for name, tensor in Experts().tensors(packed).items():
        rows, cols = tensor.shape
        wide = torch.zeros(rows, 2 * cols).bfloat16()
        tensors[name.replace("weight_packed", "weight")] = wide if name.endswith("weight_packed") else tensor
    message = f"{PREFIX}.0.gate_proj.weight has dtype bfloat16, expected uint8"
    refused(tmp_path, tensors, config(), message, **SIZES)
