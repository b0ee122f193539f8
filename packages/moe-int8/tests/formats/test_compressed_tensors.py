"""What compressed-tensors configs mean, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey
from moe_core.spec.quant_key import (
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from moe_core.testing.checkpoints import (
    PER_CHANNEL,
    PREFIX,
    E,
    Experts,
    check,
    int4_codes,
    int8_codes,
    reason_against,
    refused,
    source,
)
from moe_int8.formats.compressed_tensors import CompressedTensorsInt8Format
from torch import Tensor

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128}


def args(strategy: str | None, **changes: Any) -> dict[str, Any]:
    return {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": strategy, **changes}


def config(
    weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None, layout: str | None = "int-quantized"
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


CHANNEL, TOKEN = args("channel"), args("token", dynamic=True)
INT4 = args("channel", num_bits=4)


def w8(**changes: Any) -> Experts:
    return Experts(PER_CHANNEL, make=int8_codes, **changes)


def w4(group: int) -> Experts:
    return Experts((1, group), hidden=256, inter=128, make=int4_codes)


def int4_group(size: int) -> dict[str, Any]:
    return args("group", num_bits=4, group_size=size)


def packed(tensors: dict[str, Tensor], bits: int = 4) -> dict[str, Tensor]:
    """The same experts as the packed form keeps them, by its definition: one bit field after the other."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(".weight"):
            found[name] = tensor
            continue
        rows, cols = tensor.shape
        fields = tensor.long() + 2 ** (bits - 1)
        count = 32 // bits
        padded = torch.nn.functional.pad(fields, (0, -cols % count)).view(rows, -1, count)
        words = sum(padded[:, :, i] << (bits * i) for i in range(count))
        assert isinstance(words, Tensor)
        found[f"{name}_packed"] = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        found[f"{name}_shape"] = torch.tensor([rows, cols])
    return found


@pytest.mark.parametrize(
    "store", [Tensor.bfloat16, Tensor.float, Tensor.half, Tensor.flatten], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_w8a8(tmp_path: Path, store: Any, gated: bool) -> None:
    experts = w8(gated=gated)
    changes = {} if gated else {"hidden_act": "relu2"}
    found = source(tmp_path, experts.tensors(store), config(CHANNEL, TOKEN), **changes)
    check(found, experts, kInt8StaticChannelSym, kInt8DynamicTokenSym)


@pytest.mark.parametrize("name", ["W8A8", "W8A16", "W4A8", "W4A8 in groups"])
def test_scales_of_either_sign(tmp_path: Path, name: str) -> None:
    """AutoRound's: the largest weight of a row has the lowest code, whatever its sign."""
    grouped = name == "W4A8 in groups"
    experts = w4(64) if grouped else Experts(PER_CHANNEL, make=int4_codes if name == "W4A8" else int8_codes)
    weights = {"W4A8": INT4, "W4A8 in groups": int4_group(64)}.get(name, CHANNEL)
    for scales in experts.scales:
        for scale in scales.values():
            scale[::2] *= -1
    inputs = None if name == "W8A16" else TOKEN
    sizes = SIZES if grouped else {}
    found = source(tmp_path, experts.tensors(Tensor.bfloat16), config(weights, inputs), **sizes)
    assert found.weight_key is not None
    check(found, experts, found.weight_key, None if inputs is None else kInt8DynamicTokenSym)


INPUTS: dict[str, tuple[dict[str, Any] | None, QuantKey | None]] = {
    "token": (TOKEN, kInt8DynamicTokenSym),
    "zero points": ({**TOKEN, "symmetric": False}, kInt8DynamicTokenAsym),
    "16 bits": (None, None),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized", None])
def test_activations(tmp_path: Path, name: str, layout: str | None) -> None:
    inputs, key = INPUTS[name]
    experts = w8()
    found = source(tmp_path, experts.tensors(Tensor.bfloat16), config(CHANNEL, inputs, layout))
    check(found, experts, kInt8StaticChannelSym, key)


def test_biases_of_w8a16(tmp_path: Path) -> None:
    experts = w8()
    tensors = experts.tensors(Tensor.bfloat16)
    for name in list(tensors):
        if name.endswith(".weight"):
            bias = torch.arange(tensors[name].shape[0]).bfloat16() + len(name)
            tensors[name.removesuffix("weight") + "bias"] = bias
    found = source(tmp_path, tensors, config(CHANNEL))
    check(found, experts, kInt8StaticChannelSym, None)
    weights = found.weights()
    assert found.config.has_bias
    assert weights.w13_bias is not None
    assert torch.equal(weights.w13_bias[1, 192:], tensors[f"{PREFIX}.1.up_proj.bias"].float())


@pytest.mark.parametrize("form", ["bytes", "words"])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_w4a8(tmp_path: Path, group: int, form: str) -> None:
    experts = w4(group)
    weights = INT4 if group == -1 else int4_group(group)
    tensors, layout = experts.tensors(Tensor.bfloat16), "int-quantized"
    if form == "words":
        tensors, layout = packed(tensors), "pack-quantized"
    key = kInt4W4A8StaticChannelSym if group == -1 else kInt4W4A8StaticGroup128Sym.with_group(1, group)
    found = source(tmp_path, tensors, config(weights, TOKEN, layout), **SIZES)
    check(found, experts, key, kInt8DynamicTokenSym)


@pytest.mark.parametrize("store", [Tensor.half, Tensor.float], ids=lambda f: f.__name__)
def test_group_scales_of_other_types_become_float32(tmp_path: Path, store: Any) -> None:
    experts = w4(64)
    found = source(tmp_path, experts.tensors(store), config(int4_group(64), TOKEN), **SIZES)
    key = kInt4W4A8StaticGroup128Sym.with_group(1, 64).with_scale_dtype(torch.float32)
    check(found, experts, key, kInt8DynamicTokenSym)


def test_words_that_are_not_full(tmp_path: Path) -> None:
    """K = 100 and N = 36 columns of 4 bits end in half a word."""
    experts = Experts(PER_CHANNEL, hidden=100, inter=36, make=int4_codes)
    sizes = {"hidden_size": 100, "moe_intermediate_size": 36}
    found = source(tmp_path, packed(experts.tensors(Tensor.bfloat16)), config(INT4, TOKEN, "pack-quantized"), **sizes)
    check(found, experts, kInt4W4A8StaticChannelSym, kInt8DynamicTokenSym)


def test_packed_bytes(tmp_path: Path) -> None:
    experts = w8()
    tensors = packed(experts.tensors(Tensor.bfloat16), bits=8)
    found = source(tmp_path, tensors, config(CHANNEL, TOKEN, "pack-quantized"))
    check(found, experts, kInt8StaticChannelSym, kInt8DynamicTokenSym)


def test_zero_points_of_older_versions_are_zeros(tmp_path: Path) -> None:
    experts = w8()
    tensors = experts.tensors(Tensor.bfloat16, extra={"weight_zero_point": torch.zeros(1, dtype=torch.int8)})
    check(source(tmp_path / "a", tensors, config(CHANNEL, TOKEN)), experts, kInt8StaticChannelSym, kInt8DynamicTokenSym)
    name = f"{PREFIX}.2.up_proj.weight_zero_point"
    tensors[name] = torch.ones(1, dtype=torch.int8)
    refused(tmp_path / "b", tensors, config(CHANNEL, TOKEN), name, "holds values other than 0, expected symmetric")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights per tensor": (config(args("tensor"), TOKEN), "int8 weights have strategy 'tensor', expected 'channel'"),
    "weights by group": (config(args("group", group_size=128), TOKEN), "strategy 'group', expected 'channel'"),
    "static activations": (config(CHANNEL, args("tensor")), "is static int8 by tensor, expected dynamic int8 by token"),
    "dynamic per tensor": (
        config(CHANNEL, args("tensor", dynamic=True)),
        "is dynamic int8 by tensor, expected dynamic",
    ),
    "static tokens": (config(CHANNEL, args("token")), "is static int8 by token, expected dynamic int8 by token"),
    "activations by group": (
        config(CHANNEL, args("group", group_size=128, dynamic=True)),
        "is dynamic int8 by group 128, expected dynamic int8 by token",
    ),
    "4-bit activations": (config(CHANNEL, {**TOKEN, "num_bits": 4}), "is dynamic int4 by token, expected dynamic int8"),
    "float8 activations": (config(INT4, {**TOKEN, "type": "float"}), "is dynamic float8 by token, expected dynamic"),
    "asymmetric": (config({**CHANNEL, "symmetric": False}, TOKEN), "weights is asymmetric, expected symmetric and"),
    "dynamic weights": (
        config({**CHANNEL, "dynamic": True}, TOKEN),
        "weights is dynamic, expected symmetric and static",
    ),
    "other groups": (config(int4_group(96), TOKEN), "group_size is 96, expected 32, 64 or 128"),
    "no group": (config(args("group", num_bits=4), TOKEN), "group_size is None, expected 32, 64 or 128"),
    "4-bit tensors": (config(args("tensor", num_bits=4), TOKEN), "strategy 'tensor', expected 'channel' or 'group'"),
    "bits": (config({**CHANNEL, "num_bits": 6}, TOKEN), "group_0 has int6 weights, expected int8 or int4"),
    "float weights": (config({**CHANNEL, "type": "float"}), "group_0 has float8 weights, expected int8 or int4"),
    "format": (config(CHANNEL, TOKEN, "marlin-24"), "format is 'marlin-24', expected 'int-quantized'"),
    "W4A16": (config(INT4), "int4 weights with 16-bit activations: those are the scheme wna16's"),
    "packed W8A16": (config(CHANNEL, None, "pack-quantized"), "int8 weights with 16-bit activations: those are the"),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups is None, expected an object with groups"),
    "another tool": ({"quant_method": "fp8"}, "quant_method is 'fp8', expected 'compressed-tensors'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(CompressedTensorsInt8Format(), tmp_path, w8().tensors(), quantization)


@pytest.mark.parametrize("name", ["weights per tensor", "static activations", "dynamic per tensor", "static tokens"])
def test_a_layer_of_such_a_config_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """By the format that would read it, whatever else is installed."""
    quantization, message = REFUSED[name]
    refused(tmp_path, w8().tensors(), quantization, "config_groups.group_0", message)


BROKEN: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "orientation": (
        config(CHANNEL, TOKEN),
        lambda t: t.mT.contiguous(),
        "gate_proj.weight_scale",
        "has shape [1, 192], expected [192, 1] (static int8 by channel weights with dynamic int8 by token activations",
    ),
    "per tensor": (
        config(CHANNEL, TOKEN),
        lambda t: t[:1, 0].clone(),
        "gate_proj.weight_scale",
        "has shape [1], expected [192, 1]",
    ),
    "groups instead of channels": (
        config(CHANNEL, TOKEN),
        lambda t: t.expand(-1, 4).contiguous(),
        "gate_proj.weight_scale",
        "has shape [192, 4], expected [192, 1]",
    ),
    "integers": (config(CHANNEL, TOKEN), Tensor.int, "gate_proj.weight_scale", "has dtype int32, expected float32 or"),
    "a group that doesn't divide K": (
        config(int4_group(128), TOKEN),
        lambda t: t.expand(-1, 3).contiguous(),
        "gate_proj.weight",
        "has 320 columns, expected a multiple of 128 (static int4 by group 128 weights",
    ),
    "not a number": (
        config(CHANNEL, TOKEN),
        lambda t: t * float("nan"),
        "gate_proj.weight_scale",
        "has 192 NaN or Inf values of 192, first at [0, 0]",
    ),
    "scales of zero": (
        config(CHANNEL, TOKEN),
        torch.zeros_like,
        "gate_proj.weight_scale is 0",
        "expected a scale other than 0",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_scales_that_do_not_fit(tmp_path: Path, name: str) -> None:
    quantization, store, tensor, message = BROKEN[name]
    experts = Experts(PER_CHANNEL, make=int4_codes) if "group" in name else w8()
    refused(tmp_path, experts.tensors(store), quantization, f"{PREFIX}.0.{tensor}", message)


def test_codes_of_more_than_four_bits(tmp_path: Path) -> None:
    tensors = w4(64).tensors(Tensor.bfloat16)
    name = f"{PREFIX}.1.down_proj.weight"
    tensors[name][3, 5] = 8
    tensors[name][4, 5] = -9
    refused(
        tmp_path,
        tensors,
        config(int4_group(64), TOKEN),
        f"{name} has 2 out-of-range (expected -8 to 7) values of 32768, first at [3, 5]",
        **SIZES,
    )


def test_tensors_that_are_not_of_this_format(tmp_path: Path) -> None:
    base = w8().tensors(Tensor.bfloat16)
    gate = f"{PREFIX}.0.gate_proj"
    cases: dict[str, tuple[dict[str, Tensor], str]] = {
        "g_idx": (
            w8().tensors(extra={"weight_g_idx": torch.zeros(320).int()}),
            f"{gate}.weight_g_idx is I32",
        ),
        "smoothing": (
            w8().tensors(extra={"pre_quant_scale": torch.ones(320)}),
            "pre_quant_scale scales the activations",
        ),
        "not compressed": (
            {n: t.bfloat16() if n.endswith(".weight") else t for n, t in base.items()},
            f"{gate}.weight has dtype bfloat16, expected int8",
        ),
        "one projection left alone": (
            {n: t.bfloat16() if n.endswith("gate_proj.weight") else t for n, t in base.items()},
            "all matrices of a layer's experts must be quantized alike",
        ),
        "no scale": (
            {n: t for n, t in base.items() if not n.endswith("gate_proj.weight_scale")},
            f"{gate}.weight_scale is missing in",
        ),
        "shape": (
            {n: t[:, :-1].contiguous() if n.endswith("down_proj.weight") else t for n, t in base.items()},
            "has shape",
        ),
        "one expert's": (
            {n: t for n, t in base.items() if n != f"{PREFIX}.1.up_proj.weight"},
            f"{PREFIX}.1.up_proj.weight is missing",
        ),
        "an expert": ({n: t for n, t in base.items() if f"{PREFIX}.1." not in n}, "expert 1 is missing"),
        "types": (
            {**base, f"{PREFIX}.1.up_proj.weight": base[f"{PREFIX}.1.up_proj.weight"].short()},
            f"{PREFIX}.1.up_proj.weight is I16 [192, 320], expected I8",
        ),
        "bias": (w8().tensors(extra={"bias": torch.zeros(191)}), f"{gate}.bias has shape [191], expected [192]"),
    }
    assert len(base) == 6 * E
    for name, (tensors, message) in cases.items():
        refused(tmp_path / name, tensors, config(CHANNEL, TOKEN), message)


def test_a_stated_shape_that_is_another(tmp_path: Path) -> None:
    tensors = packed(w4(64).tensors(Tensor.bfloat16))
    tensors[f"{PREFIX}.2.gate_proj.weight_shape"] = torch.tensor([128, 255])
    quantization = config(int4_group(64), TOKEN, "pack-quantized")
    message = f"{PREFIX}.2.gate_proj.weight_shape states [128, 255], expected [128, 256]"
    refused(tmp_path / "a", tensors, quantization, message, **SIZES)
    del tensors[f"{PREFIX}.2.gate_proj.weight_shape"]
    both = w4(64).tensors(Tensor.bfloat16) | packed(w4(64).tensors(Tensor.bfloat16))
    refused(tmp_path / "b", both, quantization, "weight and", "weight_packed are both present", **SIZES)


def test_matrices_that_are_stored_differently(tmp_path: Path) -> None:
    quantization = config(int4_group(64), TOKEN, "pack-quantized")
    in_bytes, in_words = w4(64).tensors(Tensor.bfloat16), packed(w4(64).tensors(Tensor.bfloat16))
    mixed = {n: t for n, t in in_words.items() if "down_proj" not in n}
    mixed |= {n: t for n, t in in_bytes.items() if "down_proj" in n}
    refused(tmp_path / "a", mixed, quantization, "has weight and weight_packed", "must be stored alike", **SIZES)
    without = {n: t for n, t in in_words.items() if not n.endswith("up_proj.weight_packed")}
    refused(tmp_path / "b", without, quantization, "up_proj.weight_packed is missing", **SIZES)
