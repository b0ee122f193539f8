"""Quark's FP8 schemes."""

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
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
)
from moe_core.testing.checkpoints import (
    MX,
    PER_CHANNEL,
    PER_TENSOR,
    PREFIX,
    Experts,
    check,
    exponents,
    reason_against,
    source,
)
from moe_fp8.formats.quark import QuarkFp8Format
from torch import Tensor


def spec(qscheme: str, **changes: Any) -> dict[str, Any]:
    return {"dtype": "fp8_e4m3", "qscheme": qscheme, "is_dynamic": False, "symmetric": None, **changes}


def config(weight: dict[str, Any] | None, inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": layer, "layer_quant_config": {}, "exclude": [], **changes}


MX_SPEC = spec("per_group", group_size=32, scale_format="e8m0")
WEIGHTS: dict[str, tuple[dict[str, Any], tuple[int, int], QuantKey]] = {
    "tensor": (spec("per_tensor"), PER_TENSOR, kFp8StaticTensorSym),
    "channel": (spec("per_channel", ch_axis=0), PER_CHANNEL, kFp8StaticChannelSym),
    "block": (spec("per_block", block_size=[128, 128]), (128, 128), kFp8Static128BlockSym),
    "oblong block": (spec("per_block", block_size=[96, 128]), (96, 128), kFp8Static128BlockSym.with_group(96, 128)),
    "mxfp8": (MX_SPEC, MX, kMxfp8Static),
}
INPUTS: dict[str, tuple[dict[str, Any] | None, QuantKey | None]] = {
    "none": (None, None),
    "static": (spec("per_tensor"), kFp8StaticTensorSym),
    "tensor": (spec("per_tensor", is_dynamic=True), kFp8DynamicTensorSym),
    "channel": (spec("per_channel", is_dynamic=True), kFp8DynamicTokenSym),
    "token": (spec("per_token", is_dynamic=True), kFp8DynamicTokenSym),
    "group": (spec("per_group", group_size=128, is_dynamic=True), kFp8Dynamic128Sym),
    "mxfp8": ({**MX_SPEC, "is_dynamic": True}, kMxfp8DynamicEven),
    "mxfp8 even": ({**MX_SPEC, "is_dynamic": True, "scale_calculation_mode": "even"}, kMxfp8DynamicEven),
    "mxfp8 floor": ({**MX_SPEC, "is_dynamic": True, "scale_calculation_mode": "floor"}, kMxfp8DynamicDown),
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_schemes(tmp_path: Path, weights: str, inputs: str) -> None:
    weight, group, weight_key = WEIGHTS[weights]
    activation, activation_key = INPUTS[inputs]

    def store(scale: Tensor) -> Tensor:
        if group == MX:
            return exponents(scale)
        return scale.reshape(()) if group == PER_TENSOR else scale.flatten() if group == PER_CHANNEL else scale

    experts = Experts(group)
    extra = {"input_scale": torch.tensor(2.0)} if inputs == "static" else None
    found = source(tmp_path, experts.tensors(store, extra=extra), config(weight, activation))
    check(found, experts, weight_key, activation_key)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_blocks_with_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    experts = Experts((128, 128))
    tensors = experts.tensors(lambda scale: exponents(scale, dtype))
    quantization = config(spec("per_block", block_size=[128, 128], scale_format="e8m0"))
    check(source(tmp_path, tensors, quantization), experts, kFp8Static128BlockSym, None)


def test_layer_configs_win(tmp_path: Path) -> None:
    """By pattern or name; another layer's is not taken."""
    experts = Experts(PER_CHANNEL)
    layers = {"*self_attn*": {"weight": spec("per_tensor")}, "*mlp.experts*": {"weight": spec("per_channel")}}
    quantization = config(spec("per_tensor"), layer_quant_config=layers)
    check(source(tmp_path / "a", experts.tensors(), quantization), experts, kFp8StaticChannelSym, None)
    layers = {PREFIX: {"weight": spec("per_channel")}}
    quantization = config(spec("per_tensor"), layer_quant_config=layers)
    check(source(tmp_path / "b", experts.tensors(), quantization), experts, kFp8StaticChannelSym, None)
    layers = {"re:model\\.layers\\.0\\.mlp\\.experts\\.\\d+\\.": {"weight": spec("per_channel")}}
    quantization = config(spec("per_tensor"), layer_quant_config=layers)
    check(source(tmp_path / "d", experts.tensors(), quantization), experts, kFp8StaticChannelSym, None)
    types = {"Linear": {"weight": spec("per_channel")}}
    quantization = config(spec("per_tensor"), layer_type_quant_config=types)
    check(source(tmp_path / "c", experts.tensors(), quantization), experts, kFp8StaticChannelSym, None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp4": (config(spec("per_group", dtype="fp4", group_size=32)), "dtype is 'fp4', expected 'fp8_e4m3'"),
    "qscheme": (
        config(spec("fancy")),
        "qscheme is 'fancy', expected 'per_tensor', 'per_channel', 'per_block' or MXFP8",
    ),
    "dynamic": (config(spec("per_tensor", is_dynamic=True)), "weight is dynamic, expected static"),
    "no weight": (config(None), "weight is null"),
    "no config": ({"quant_method": "quark"}, "global_quant_config is None, expected an object"),
    "int8 inputs": (
        config(spec("per_tensor"), spec("per_tensor", dtype="int8")),
        "input_tensors is static int8 per_tensor",
    ),
    "static tokens": (config(spec("per_tensor"), spec("per_channel")), "static fp8_e4m3 per_channel"),
    "inputs": (config(spec("per_tensor"), spec("fancy", is_dynamic=True)), "dynamic fp8_e4m3 fancy"),
    "rounding": (
        config(MX_SPEC, {**MX_SPEC, "is_dynamic": True, "scale_calculation_mode": "ceil"}),
        "input_tensors: scale_calculation_mode is 'ceil', expected 'even' or 'floor'",
    ),
    "projections": (
        config(spec("per_tensor"), layer_quant_config={"*down_proj": {"weight": spec("per_channel")}}),
        f"the experts of {PREFIX} are quantized differently",
    ),
    "outputs": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": spec("per_tensor"), "output_tensors": spec("per_tensor")},
        },
        "output_tensors are quantized, expected null",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(QuarkFp8Format(), tmp_path, Experts(PER_TENSOR).tensors(), quantization)
