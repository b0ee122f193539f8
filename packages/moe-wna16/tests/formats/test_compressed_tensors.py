"""compressed-tensors: packed and unpacked codes, zero points along the rows, activation order, fp8 activations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey, kFp8DynamicTokenSym, kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_wna16.formats.compressed_tensors import CompressedTensorsWNA16Format
from moe_wna16_words import (
    SIZES,
    Codes,
    Matrix,
    Tensors,
    check,
    signed_bytes,
    signed_bytes_and_zeros,
    signed_pairs,
    words,
    words_and_order,
    words_and_zeros,
)
from torch import Tensor

KEYS = {(4, True): kInt4Static, (4, False): kInt4StaticAsym, (8, True): kInt8Static, (8, False): kInt8StaticAsym}
FP8 = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
INT8 = {**FP8, "type": "int"}


def weights_of(experts: Codes, **changes: Any) -> dict[str, Any]:
    return {
        "type": "int",
        "num_bits": experts.bits,
        "strategy": "channel" if experts.group == -1 else "group",
        "group_size": None if experts.group == -1 else experts.group,
        "symmetric": experts.symmetric,
        "dynamic": False,
        "actorder": None,
        **changes,
    }


def config(weights: Any, inputs: Any = None, layout: str | None = "pack-quantized") -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def key_of(experts: Codes, **changes: Any) -> QuantKey:
    key = KEYS[experts.bits, experts.symmetric].with_group(1, experts.group).with_scale_dtype(experts.dtype)
    return replace(key, **changes)


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_words(tmp_path: Path, bits: int, symmetric: bool, group: int) -> None:
    experts = Codes(bits, group, symmetric=symmetric)
    tensors = experts.tensors(words if symmetric else words_and_zeros)
    found = source(tmp_path, tensors, config(weights_of(experts)), **SIZES)
    assert found.format.name == "compressed-tensors pack-quantized"
    check(found, experts, key_of(experts))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_sizes_that_fill_no_words(tmp_path: Path, bits: int, symmetric: bool) -> None:
    """101 columns end in the middle of a byte, 43 rows of zero points in the middle of a word."""
    experts = Codes(bits, symmetric=symmetric, hidden=101, inter=43)
    tensors = experts.tensors(words if symmetric else words_and_zeros)
    sizes = {"hidden_size": 101, "moe_intermediate_size": 43}
    check(source(tmp_path, tensors, config(weights_of(experts)), **sizes), experts, key_of(experts))


def stacked(experts: Codes) -> Tensors:
    """As Gemma 4's checkpoints have them: ``experts.gate_up_proj_packed``, ``experts.gate_up_proj_scale``."""
    kept = experts.fused(words if experts.symmetric else words_and_zeros).items()
    return {name.replace(".weight_", "_"): tensor for name, tensor in kept if not name.endswith("weight_shape")}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, -1])
def test_experts_in_one_tensor(tmp_path: Path, bits: int, group: int) -> None:
    experts = Codes(bits, group)
    tensors = stacked(experts)
    assert sorted(tensors) == [f"{PREFIX}.{name}" for name in STACKED]
    found = source(tmp_path, tensors, config(weights_of(experts)), **SIZES)
    assert found.format.name == "compressed-tensors pack-quantized"
    check(found, experts, key_of(experts))


STACKED = ["down_proj_packed", "down_proj_scale", "gate_up_proj_packed", "gate_up_proj_scale"]


@pytest.mark.parametrize("name", STACKED)
def test_experts_in_one_tensor_that_are_incomplete(tmp_path: Path, name: str) -> None:
    experts = Codes()
    tensors = {key: tensor for key, tensor in stacked(experts).items() if not key.endswith(name)}
    refused(tmp_path, tensors, config(weights_of(experts)), f"{PREFIX}.{name} is missing in", **SIZES)


def test_experts_in_one_tensor_with_more_than_is_known(tmp_path: Path) -> None:
    asymmetric = Codes(symmetric=False)
    text = "has zero points, which is not read of experts in one tensor (gate_up_proj_packed)"
    refused(tmp_path / "a", stacked(asymmetric), config(weights_of(asymmetric)), text, **SIZES)
    experts = Codes()
    weights = weights_of(experts, actorder="group")
    text = "has actorder 'group', which is not read of experts in one tensor (gate_up_proj_packed)"
    refused(tmp_path / "b", stacked(experts), config(weights), text, **SIZES)
    tensors = {**stacked(experts), f"{PREFIX}.down_proj_g_idx": torch.zeros(3, 4, dtype=torch.int32)}
    text = "down_proj_g_idx is I32: experts of this format have no such tensor"
    refused(tmp_path / "c", tensors, config(weights_of(experts)), text, **SIZES)


def test_garbage_behind_the_last_column_is_dropped(tmp_path: Path) -> None:
    experts = Codes(hidden=101, inter=43)
    tensors = experts.tensors(words)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        # fields 5, 6 and 7 of a row's last word belong to no column of 101, nor 3 to 7 of 43
        tensors[name][:, -1] |= -(1 << 20)
    sizes = {"hidden_size": 101, "moe_intermediate_size": 43}
    found = source(tmp_path, tensors, config(weights_of(experts)), **sizes)
    check(found, experts, key_of(experts))
    clean = source(tmp_path / "clean", experts.tensors(words), config(weights_of(experts)), **sizes)
    assert torch.equal(found.weights().w13, clean.weights().w13)
    assert torch.equal(found.weights().w2, clean.weights().w2)


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized", None])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_bytes(tmp_path: Path, symmetric: bool, bits: int, layout: str | None) -> None:
    experts = Codes(bits, 64, symmetric=symmetric, hidden=97)
    tensors = experts.tensors(signed_bytes if symmetric else signed_bytes_and_zeros)
    sizes = {**SIZES, "hidden_size": 97}
    check(source(tmp_path, tensors, config(weights_of(experts), None, layout), **sizes), experts, key_of(experts))


def unpacked_zeros(matrix: Matrix, bits: int) -> Tensors:
    return {**words(matrix, bits), "weight_zero_point": (matrix.z - 2 ** (bits - 1)).to(torch.int8)}


@pytest.mark.parametrize("bits", [4, 8])
def test_older_versions_do_not_pack_zero_points(tmp_path: Path, bits: int) -> None:
    experts = Codes(bits, symmetric=False)
    found = source(tmp_path, experts.tensors(unpacked_zeros), config(weights_of(experts)), **SIZES)
    check(found, experts, key_of(experts))


@pytest.mark.parametrize("write", [unpacked_zeros, words_and_zeros], ids=["bytes", "words"])
def test_zero_points_of_symmetric_weights(tmp_path: Path, write: Any) -> None:
    experts = Codes()
    check(
        source(tmp_path / "a", experts.tensors(write), config(weights_of(experts)), **SIZES), experts, key_of(experts)
    )
    other = Codes(symmetric=False).tensors(write)
    refused(tmp_path / "b", other, config(weights_of(experts)), "gate_proj.weight_zero_point", "symmetric", **SIZES)


# ------------------------------------------------------------------ fp8 activations


@pytest.mark.parametrize("group", [128, 32, -1])
@pytest.mark.parametrize(
    ("write", "layout"),
    [(signed_bytes, "int-quantized"), (words, "pack-quantized"), (signed_pairs, "int4-quantized")],
    ids=["bytes", "words", "pairs"],
)
def test_fp8_activations(tmp_path: Path, write: Any, layout: str, group: int) -> None:
    experts = Codes(group=group)
    found = source(tmp_path, experts.tensors(write), config(weights_of(experts), FP8, layout), **SIZES)
    check(found, experts, key_of(experts), kFp8DynamicTokenSym)


# ------------------------------------------------------------------ activation order


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_activation_order(tmp_path: Path, bits: int, symmetric: bool) -> None:
    def write(matrix: Matrix, bits: int) -> Tensors:
        return {**words_and_zeros(matrix, bits), **words_and_order(matrix, bits)}

    experts = Codes(bits, symmetric=symmetric, order=True)
    tensors = experts.tensors(words_and_order if symmetric else write)
    found = source(tmp_path, tensors, config(weights_of(experts, actorder="group")), **SIZES)
    check(found, experts, key_of(experts, permuted=True))
    g_idx = found.weights().w13_g_idx
    assert g_idx is not None
    assert torch.equal(g_idx[1], experts.matrices[1]["gate"].g_idx)


@pytest.mark.parametrize("actorder", ["weight", "static", None, False])
def test_order_of_weights_leaves_groups_in_place(tmp_path: Path, actorder: Any) -> None:
    experts = Codes()
    quantization = config(weights_of(experts, actorder=actorder))
    check(source(tmp_path, experts.tensors(words), quantization, **SIZES), experts, key_of(experts))


def test_an_order_that_says_nothing(tmp_path: Path) -> None:
    """The tool begins with -1 everywhere, and reads any -1 as columns in order."""
    experts = Codes()
    tensors = experts.tensors(words_and_order)
    unset = {n: torch.full_like(t, -1) if n.endswith("g_idx") else t for n, t in tensors.items()}
    quantization = config(weights_of(experts, actorder="group"))
    check(source(tmp_path / "a", unset, quantization, **SIZES), experts, key_of(experts))
    check(source(tmp_path / "b", tensors, quantization, **SIZES), experts, key_of(experts))
    missing = experts.tensors(words)
    refused(tmp_path / "c", missing, quantization, "gate_proj.weight_g_idx is missing in", **SIZES)


# ------------------------------------------------------------------ names and biases


def test_biases_of_gpt_oss(tmp_path: Path) -> None:
    """Saved one expert after the other: gate and up lie apart, each with its bias."""
    experts = Codes(group=32)
    tensors = experts.tensors(words)
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        rows = tensors[name].shape[0]
        tensors[name.replace("weight_packed", "bias")] = torch.arange(rows).bfloat16() + len(name)
    router = {"weight": torch.zeros(3, 96).bfloat16(), "bias": torch.zeros(3).bfloat16()}
    tensors |= {f"model.layers.0.mlp.router.{name}": tensor for name, tensor in router.items()}
    changes = {
        "model_type": "gpt_oss",
        "num_experts": None,
        "num_local_experts": 3,
        "moe_intermediate_size": None,
        "intermediate_size": 48,
        "hidden_size": 96,
        "swiglu_limit": 7.0,
        "norm_topk_prob": None,
    }
    found = source(tmp_path, tensors, config(weights_of(experts)), **changes)
    check(found, experts, key_of(experts))
    weights = found.weights()
    assert found.config.has_bias
    assert found.config.activation.value == "swigluoai"
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    assert torch.equal(weights.w13_bias[2, 48:], tensors[f"{PREFIX}.2.up_proj.bias"].float())
    assert torch.equal(weights.w2_bias[2], tensors[f"{PREFIX}.2.down_proj.bias"].float())


MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("model.layers.0.block_sparse_moe.experts", MIXTRAL),
        ("model.layers.0.block_sparse_moe.experts", None),
        ("model.layers.0.mlp.experts", MIXTRAL),
        ("model.language_model.layers.0.mlp.experts", None),
        ("language_model.model.layers.0.feed_forward.experts", None),
        ("backbone.layers.0.mixer.experts", None),
    ],
)
def test_names_of_modules(tmp_path: Path, prefix: str, names: dict[str, str] | None) -> None:
    experts = Codes(symmetric=False)
    tensors = experts.tensors(words_and_zeros, **({"names": names} if names else {}))
    renamed = {name.replace(PREFIX, prefix): tensor for name, tensor in tensors.items()}
    check(source(tmp_path, renamed, config(weights_of(experts)), **SIZES), experts, key_of(experts))


def test_stacked_experts(tmp_path: Path) -> None:
    experts = Codes(symmetric=False)
    tensors = experts.tensors(words_and_zeros)

    def every(projection: str, suffix: str) -> Tensor:
        return torch.stack([tensors[f"{PREFIX}.{e}.{projection}.{suffix}"] for e in range(3)])

    found = {}
    for suffix in ("weight_packed", "weight_scale", "weight_zero_point"):
        both = torch.cat([every("gate_proj", suffix), every("up_proj", suffix)], dim=1)
        found |= {f"{PREFIX}.gate_up_proj.{suffix}": both, f"{PREFIX}.down_proj.{suffix}": every("down_proj", suffix)}
    check(source(tmp_path, found, config(weights_of(experts)), **SIZES), experts, key_of(experts))


def test_groups_of_other_modules_are_not_looked_at(tmp_path: Path) -> None:
    experts = Codes()
    quantization = config(weights_of(experts), layout=None)
    quantization["format"] = "mixed-precision"
    group = quantization["config_groups"]["group_0"]
    group |= {"targets": ["re:.*experts.*"], "format": "pack-quantized"}
    other = {"targets": ["re:.*self_attn.*"], "weights": weights_of(Codes(8, -1)), "format": "int-quantized"}
    quantization["config_groups"]["group_1"] = other
    check(source(tmp_path, experts.tensors(words), quantization, **SIZES), experts, key_of(experts))


# ------------------------------------------------------------------ refused


G32 = weights_of(Codes())
BITS = {
    f"{bits} bits": (config({**G32, "num_bits": bits}), f"group_0 has int{bits} weights, expected int4 or int8")
    for bits in (2, 3, 5, 6, 7)
}
BLOCK = {**G32, "strategy": "block", "group_size": None, "block_structure": [8, 8]}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **BITS,
    "floats": (config({**G32, "type": "float"}), "group_0 has float4 weights, expected int4 or int8"),
    "format": (config(G32, None, "marlin-24"), "format is 'marlin-24', expected 'pack-quantized'"),
    "dynamic": (config({**G32, "dynamic": True}), "weights is dynamic, expected static"),
    "tensor": (
        config({**G32, "strategy": "tensor", "group_size": None}),
        "strategy is 'tensor', expected 'channel' or 'group'",
    ),
    "block": (config(BLOCK), "strategy is 'block', expected 'channel' or 'group'"),
    "no group": (config({**G32, "group_size": None}), "group_size is None, expected the columns of a group"),
    "int8 activations": (config(G32, INT8), "is dynamic int8 by token, expected dynamic float8 by token or null"),
    "static fp8": (
        config(G32, {**FP8, "dynamic": False, "strategy": "tensor"}),
        "is static float8 by tensor, expected",
    ),
    "fp8 with int8": (config({**G32, "num_bits": 8}, FP8), "has int8 weights with dynamic float8 by token activations"),
    "fp8 with zero points": (
        config({**G32, "symmetric": False}, FP8),
        "has asymmetric int4 weights with dynamic float8",
    ),
    "another tool": ({"quant_method": "gptq"}, "quant_method is 'gptq', expected 'compressed-tensors'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(CompressedTensorsWNA16Format(), tmp_path, Codes().tensors(words), quantization)


def test_what_is_the_scheme_int8s(tmp_path: Path) -> None:
    experts = Codes(8, -1)
    adapter, quantization = CompressedTensorsWNA16Format(), config(weights_of(experts), None, "int-quantized")
    reason = reason_against(adapter, tmp_path, experts.tensors(signed_bytes), quantization)
    assert reason == "config_groups.group_0 has int8 weights by channel in bytes: those are the scheme int8's"


def test_the_message_says_what_was_found(tmp_path: Path) -> None:
    """Not what was expected in its place."""
    quantization = config(G32, None, "marlin-24")
    message = "format is 'marlin-24', expected 'pack-quantized', 'int-quantized' or 'int4-quantized'"
    refused(tmp_path, Codes().tensors(words), quantization, message, **SIZES)


UP = f"{PREFIX}.0.up_proj"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "groups of scales": (
        "weight_scale",
        lambda t: t[:, :2].contiguous(),
        f"{UP}.weight_scale has shape [48, 2], expected [48, 3] (static int4 by group 32 weights with 16-bit",
    ),
    "groups of zero points": (
        "weight_zero_point",
        lambda t: t[:, :2].contiguous(),
        f"{UP}.weight_zero_point has shape [6, 2], expected [6, 3]",
    ),
    "zero points along K": (
        "weight_zero_point",
        lambda t: torch.zeros(48, 1, dtype=torch.int32),
        f"{UP}.weight_zero_point has shape [48, 1], expected [6, 3]",
    ),
    "type of zero points": (
        "weight_zero_point",
        lambda t: torch.zeros(48, 3, dtype=torch.uint8),
        f"{UP}.weight_zero_point has dtype uint8, expected int32 or int8",
    ),
    "words": (
        "weight_packed",
        lambda t: t[:, 1:].contiguous(),
        f"{UP}.weight_packed has shape [48, 11], expected [48, 12]",
    ),
    "type of words": ("weight_packed", Tensor.long, f"{UP}.weight_packed has dtype int64, expected int32"),
    "NaN": ("weight_scale", lambda t: t * float("nan"), f"{UP}.weight_scale has 144 NaN or Inf values of 144"),
    "stated shape": ("weight_shape", lambda t: t + 1, f"{UP}.weight_shape states [49, 97], expected [48, 96]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str) -> None:
    suffix, change, message = BROKEN[name]
    experts = Codes(symmetric=False)
    tensors = {
        key: change(tensor) if key.endswith(f"up_proj.{suffix}") else tensor
        for key, tensor in experts.tensors(words_and_zeros).items()
    }
    refused(tmp_path, tensors, config(weights_of(experts)), message, **SIZES)


def test_no_zero_points_where_the_config_has_them(tmp_path: Path) -> None:
    experts = Codes(symmetric=False)
    refused(tmp_path, experts.tensors(words), config(weights_of(experts)), "weight_zero_point is missing in", **SIZES)


def test_codes_of_more_than_four_bits(tmp_path: Path) -> None:
    experts = Codes(group=32)
    tensors = experts.tensors(signed_bytes)
    name = f"{PREFIX}.1.up_proj.weight"
    tensors[name][3, 5], tensors[name][4, 5] = 8, -9
    message = f"{name} has 2 out-of-range (expected -8 to 7) values of 4608, first at [3, 5]"
    refused(tmp_path, tensors, config(weights_of(experts), FP8, "int-quantized"), message, **SIZES)
