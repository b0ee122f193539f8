"""Quark's int8 configs, whose zero points count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey
from moe_core.spec.quant_key import (
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from moe_core.testing.checkpoints import (
    PER_CHANNEL,
    PER_TENSOR,
    PREFIX,
    Experts,
    check,
    int8_codes,
    reason_against,
    refused,
    source,
)
from moe_int8.formats.quark import QuarkInt8Format
from torch import Tensor

INT8 = {"dtype": "int8", "symmetric": True, "is_dynamic": False}
CHANNEL = {**INT8, "qscheme": "per_channel", "ch_axis": 0}
STATIC = {**INT8, "qscheme": "per_tensor"}
TOKEN = {**INT8, "qscheme": "per_channel", "is_dynamic": True}


def config(weight: dict[str, Any] | None, inputs: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs, **other}}


def experts() -> Experts:
    return Experts(PER_CHANNEL, make=int8_codes)


def written(**extra: Tensor) -> dict[str, Tensor]:
    """Quark writes zero points of symmetric types too."""
    zeros = {"weight_zero_point": torch.zeros(1, dtype=torch.int8)}
    return experts().tensors(Tensor.flatten, extra={**zeros, **extra})


DYNAMIC: dict[str, tuple[dict[str, Any] | None, QuantKey | None]] = {
    "16 bits": (None, None),
    "token": (TOKEN, kInt8DynamicTokenSym),
    "token by its other name": ({**TOKEN, "qscheme": "per_token"}, kInt8DynamicTokenSym),
    "zero points": ({**TOKEN, "symmetric": False}, kInt8DynamicTokenAsym),
    "tensor": ({**STATIC, "is_dynamic": True}, kInt8DynamicTensorSym),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_activations(tmp_path: Path, name: str) -> None:
    inputs, key = DYNAMIC[name]
    check(source(tmp_path, written(), config(CHANNEL, inputs)), experts(), kInt8StaticChannelSym, key)


def test_one_scale_for_a_matrix(tmp_path: Path) -> None:
    """It becomes that of each of its channels."""
    whole = Experts(PER_TENSOR, make=int8_codes)
    found = source(tmp_path, whole.tensors(lambda s: s.reshape(())), config({**INT8, "qscheme": "per_tensor"}, TOKEN))
    check(found, whole, kInt8StaticChannelSym, kInt8DynamicTokenSym)


def test_one_scale_for_a_matrix_is_not_zero(tmp_path: Path) -> None:
    whole = Experts(PER_TENSOR, make=int8_codes)
    tensors = whole.tensors(lambda s: s.reshape(()))
    name = f"{PREFIX}.1.up_proj.weight_scale"
    quantization = config({**INT8, "qscheme": "per_tensor"}, TOKEN)
    for number, bad in enumerate((float("nan"), float("inf"))):
        tensors[name] = torch.tensor(bad)
        refused(tmp_path / str(number), tensors, quantization, f"{name} has 1 NaN or Inf value of 1")
    tensors[name] = torch.tensor(0.0)
    refused(tmp_path / "zero", tensors, quantization, f"{name} is 0", "expected a scale other than 0")


def test_static_activations(tmp_path: Path) -> None:
    tensors = written(input_scale=torch.tensor([0.5]), input_zero_point=torch.zeros(1, dtype=torch.int8))
    found = source(tmp_path, tensors, config(CHANNEL, STATIC))
    check(found, experts(), kInt8StaticChannelSym, kInt8StaticTensorSym)
    assert found.weights().w2_input_zero_point is None


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32], ids=str)
def test_static_zero_points_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = written(input_scale=torch.tensor(0.5), input_zero_point=torch.tensor(-7).to(dtype))
    tensors[f"{PREFIX}.1.down_proj.input_zero_point"] = torch.tensor(31).to(dtype)
    found = source(tmp_path, tensors, config(CHANNEL, {**STATIC, "symmetric": False}))
    check(found, experts(), kInt8StaticChannelSym, kInt8StaticTensorAsym)
    weights = found.weights()
    assert weights.w13_input_zero_point is not None
    assert weights.w2_input_zero_point is not None
    assert weights.w13_input_zero_point.tolist() == [-7, -7, -7]
    assert weights.w2_input_zero_point.tolist() == [-7, 31, -7]


@pytest.mark.parametrize("bad", [128.0, -129.0, 2.5, float("nan")])
def test_zero_points_that_are_no_codes(tmp_path: Path, bad: float) -> None:
    tensors = written(input_scale=torch.tensor(0.5), input_zero_point=torch.tensor(3.0))
    name = f"{PREFIX}.2.up_proj.input_zero_point"
    tensors[name] = torch.tensor(bad)
    asymmetric = config(CHANNEL, {**STATIC, "symmetric": False})
    message = "has 1 NaN or Inf value of 1" if bad != bad else f"is {bad:g}, expected a code of -128 to 127"
    refused(tmp_path, tensors, asymmetric, f"{name} {message}")


def test_gate_and_up_get_a_range_that_holds_both(tmp_path: Path) -> None:
    """Gate reads -100 to 155 in steps of 1, up -30 to 480 in steps of 2."""
    tensors = written(input_scale=torch.tensor(1.0), input_zero_point=torch.tensor(-28))
    tensors[f"{PREFIX}.1.up_proj.input_scale"] = torch.tensor(2.0)
    tensors[f"{PREFIX}.1.up_proj.input_zero_point"] = torch.tensor(-113)
    weights = source(tmp_path, tensors, config(CHANNEL, {**STATIC, "symmetric": False})).weights()
    assert weights.w13_input_scale is not None
    assert weights.w13_input_zero_point is not None
    scale, zero = weights.w13_input_scale, weights.w13_input_zero_point
    assert scale.tolist()[::2] == [1.0, 1.0]
    assert zero.tolist()[::2] == [-28, -28]
    low, high = (-128 - int(zero[1])) * float(scale[1]), (127 - int(zero[1])) * float(scale[1])
    assert low == pytest.approx(-100, abs=float(scale[1]) / 2)
    assert high == pytest.approx(480, abs=float(scale[1]) / 2)


def test_zero_points_are_not_dropped(tmp_path: Path) -> None:
    """Of weights, which no backend has; of activations that the config calls symmetric."""
    name = f"{PREFIX}.2.gate_proj"
    tensors = written()
    tensors[f"{name}.weight_zero_point"] = torch.ones(1, dtype=torch.int8)
    refused(tmp_path / "a", tensors, config(CHANNEL, TOKEN), f"{name}.weight_zero_point holds values other than 0")
    tensors = written(input_scale=torch.tensor(0.5), input_zero_point=torch.zeros(1, dtype=torch.int8))
    tensors[f"{name}.input_zero_point"] = torch.ones(1, dtype=torch.int8)
    refused(tmp_path / "b", tensors, config(CHANNEL, STATIC), f"{name}.input_zero_point holds values other than 0")
    asymmetric = config(CHANNEL, {**STATIC, "symmetric": False})
    tensors = written(input_scale=torch.tensor(0.5))
    refused(tmp_path / "c", tensors, asymmetric, f"{PREFIX}.0.gate_proj.input_zero_point is missing in")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no weights": (config(None), "weight is null"),
    "another type": (config({**CHANNEL, "dtype": "uint8"}), "dtype is 'uint8', expected 'int8'"),
    "asymmetric weights": (config({**CHANNEL, "symmetric": False}), "is asymmetric, expected symmetric and static"),
    "dynamic weights": (config({**CHANNEL, "is_dynamic": True}), "is dynamic, expected symmetric and static"),
    "groups": (config({**INT8, "qscheme": "per_group"}), "qscheme is 'per_group', expected 'per_channel' or"),
    "input channels": (config({**CHANNEL, "ch_axis": 1}), "ch_axis is 1, expected 0 (output channels)"),
    "outputs": (config(CHANNEL, TOKEN, output_tensors=STATIC), "output_tensors are quantized, expected null"),
    "float inputs": (config(CHANNEL, {**TOKEN, "dtype": "fp8_e4m3"}), "dynamic fp8_e4m3 per_channel"),
    "static tokens": (config(CHANNEL, {**TOKEN, "is_dynamic": False}), "static int8 per_channel"),
    "asymmetric dynamic tensors": (
        config(CHANNEL, {**STATIC, "is_dynamic": True, "symmetric": False}),
        "dynamic asymmetric int8 per_tensor",
    ),
    "another tool": ({"quant_method": "awq"}, "quant_method is 'awq', expected 'quark'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(QuarkInt8Format(), tmp_path, experts().tensors(), quantization)
