"""What compressed-tensors configs mean, and what of them is refused."""

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
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.testing.checkpoints import (
    MX,
    NAMES,
    PER_CHANNEL,
    PER_TENSOR,
    PREFIX,
    E,
    Experts,
    check,
    exponents,
    reason_against,
    refused,
    source,
)
from moe_fp8.formats.compressed_tensors import CompressedTensorsFp8Format
from torch import Tensor


def args(strategy: str | None, **changes: Any) -> dict[str, Any]:
    return {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": strategy, **changes}


def config(
    weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None, layout: str | None = "float-quantized"
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


TENSOR, CHANNEL, TOKEN = args("tensor"), args("channel"), args("token", dynamic=True)
MXFP8 = args("group", group_size=32, scale_dtype="torch.uint8")

WEIGHTS: dict[str, tuple[dict[str, Any], tuple[int, int], QuantKey]] = {
    "tensor": (TENSOR, PER_TENSOR, kFp8StaticTensorSym),
    "no strategy": (args(None), PER_TENSOR, kFp8StaticTensorSym),
    "channel": (CHANNEL, PER_CHANNEL, kFp8StaticChannelSym),
    "group -1": (args(None, group_size=-1), PER_CHANNEL, kFp8StaticChannelSym),
    "block": (args("block", block_structure=[128, 128]), (128, 128), kFp8Static128BlockSym),
    "block as text": (args("block", block_structure="128x128"), (128, 128), kFp8Static128BlockSym),
    "group 64": (args("group", group_size=64), (1, 64), kFp8Static128BlockSym.with_group(1, 64)),
    "mxfp8": (MXFP8, MX, kMxfp8Static),
    "mxfp8 by format": (args("group", group_size=32), MX, kMxfp8Static),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(tmp_path: Path, name: str) -> None:
    weights, group, key = WEIGHTS[name]
    experts = Experts(group)

    def store(scale: Tensor) -> Tensor:
        if group == MX:
            return exponents(scale)
        return scale.bfloat16().reshape(1) if group == PER_TENSOR else scale.bfloat16()

    layout = "mxfp8-quantized" if group == MX else "float-quantized"
    check(source(tmp_path, experts.tensors(store), config(weights, layout=layout)), experts, key, None)


INPUTS: dict[str, tuple[dict[str, Any], QuantKey]] = {
    "token": (TOKEN, kFp8DynamicTokenSym),
    "tensor": (args("tensor", dynamic=True), kFp8DynamicTensorSym),
    "no strategy": (args(None, dynamic=True), kFp8DynamicTensorSym),
    "group 128": (args("group", group_size=128, dynamic=True), kFp8Dynamic128Sym),
    "group 64": (args("group", group_size=64, dynamic=True), kFp8Dynamic128Sym.with_group(1, 64)),
    "mxfp8": ({**MXFP8, "dynamic": True}, kMxfp8Dynamic),
}


@pytest.mark.parametrize("name", INPUTS)
def test_dynamic_activations(tmp_path: Path, name: str) -> None:
    """One scale for a tensor is not one per group of 128, whatever the weights have."""
    inputs, key = INPUTS[name]
    for weights, group in ((TENSOR, PER_TENSOR), (CHANNEL, PER_CHANNEL)):
        experts = Experts(group)
        found = source(tmp_path / str(group), experts.tensors(), config(weights, inputs))
        check(found, experts, WEIGHTS[weights["strategy"]][2], key)


def test_static_activations(tmp_path: Path) -> None:
    experts = Experts(PER_TENSOR)
    scale = {"input_scale": torch.tensor([0.5]).bfloat16()}
    tensors = experts.tensors(lambda s: s.reshape(1).bfloat16(), extra=scale)
    found = source(tmp_path, tensors, config(TENSOR, TENSOR))
    check(found, experts, kFp8StaticTensorSym, kFp8StaticTensorSym)
    assert found.weights().w13_input_scale is not None


@pytest.mark.parametrize("block", [(128, 128), (64, 128), (128, 64), (64, 64), (96, 128), (128, 160)], ids=str)
def test_block_structure_is_read(tmp_path: Path, block: tuple[int, int]) -> None:
    """96x128 and 128x160 have grids of the shapes of 128x128: assuming that would give other values silently."""
    experts = Experts(block)
    inputs = args("group", group_size=block[1], dynamic=True)
    found = source(tmp_path, experts.tensors(), config(args("block", block_structure=list(block)), inputs))
    check(
        found,
        experts,
        kFp8Static128BlockSym.with_group(*block),
        kFp8Dynamic128Sym.with_group(1, block[1]),
    )


def test_the_group_of_the_experts(tmp_path: Path) -> None:
    """Attention in another group."""
    attention = {"targets": ["re:.*self_attn.*"], "weights": TENSOR, "input_activations": None, "format": None}
    experts = {"targets": ["re:.*mlp.experts.*"], "weights": CHANNEL, "input_activations": TOKEN}
    quantization = {**config(None), "config_groups": {"group_0": attention, "group_1": experts}}
    found = source(tmp_path, Experts(PER_CHANNEL).tensors(), quantization)
    check(found, Experts(PER_CHANNEL), kFp8StaticChannelSym, kFp8DynamicTokenSym)


def test_projections_of_different_groups(tmp_path: Path) -> None:
    one = {"targets": ["re:.*(gate|up)_proj"], "weights": CHANNEL, "input_activations": TOKEN}
    other = {"targets": ["re:.*down_proj"], "weights": TENSOR, "input_activations": TOKEN}
    quantization = {**config(None), "config_groups": {"group_0": one, "group_1": other}}
    refused(
        tmp_path,
        Experts(PER_CHANNEL).tensors(),
        quantization,
        f"{PREFIX}.0.down_proj",
        "static float8 by tensor",
        f"{PREFIX}.0.gate_proj",
        "static float8 by channel",
        "must be quantized alike",
    )


def test_ignore_lists_are_not_believed(tmp_path: Path) -> None:
    """The experts are quantized, whatever the list says, also where its names have NUL bytes."""
    quantization = {**config(CHANNEL, TOKEN), "ignore": ["re:.*experts.*", "lm_head.\0model", f"{PREFIX}.0.up_proj"]}
    found = source(tmp_path, Experts(PER_CHANNEL).tensors(), quantization)
    check(found, Experts(PER_CHANNEL), kFp8StaticChannelSym, kFp8DynamicTokenSym)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": (config(args("fancy")), "strategy is 'fancy', expected 'tensor', 'channel', 'block' or 'group'"),
    "activation strategy": (config(TENSOR, args("channel", dynamic=True)), "dynamic float8 by channel, expected"),
    "static tokens": (config(TENSOR, args("token")), "is static float8 by token, expected"),
    "local": (config(TENSOR, args("group", group_size=16, dynamic="local")), "dynamic float8 by group 16, expected"),
    "int8 activations": (config(TENSOR, {**TOKEN, "type": "int"}), "dynamic int8 by token, expected symmetric float8"),
    "asymmetric": (config({**CHANNEL, "symmetric": False}), "is asymmetric, expected symmetric and static"),
    "dynamic weights": (config({**CHANNEL, "dynamic": True}), "is dynamic, expected symmetric and static"),
    "no block": (config(args("block")), "block_structure is missing for strategy 'block'"),
    "no group": (config(args("group")), "group_size is missing for strategy 'group'"),
    "format": (config(CHANNEL, layout="marlin-24"), "format is 'marlin-24', expected 'float-quantized'"),
    "bits": (config({**CHANNEL, "num_bits": 6}), "group_0 has float6 weights, expected float8"),
    "int weights": (config({**CHANNEL, "type": "int"}), "group_0 has int8 weights, expected float8"),
    "no groups": ({"quant_method": "compressed-tensors"}, "config_groups is None, expected an object with groups"),
    "no weights": (config(None), "no group of config_groups has weights"),
    "a block of one": (config(args("block", block_structure=[128])), "block_structure is [128], expected [rows, col"),
    "bits as text": (config({**CHANNEL, "num_bits": "8"}), "weights: num_bits is '8', expected an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(
        CompressedTensorsFp8Format(), tmp_path, Experts(PER_CHANNEL).tensors(), quantization
    )


@pytest.mark.parametrize(
    ("weights", "group", "message"),
    [
        (TENSOR, PER_CHANNEL, "weight_scale has shape [192, 1], expected [] (static float8 by tensor"),
        (CHANNEL, PER_TENSOR, "weight_scale has shape [1, 1], expected [192, 1] (static float8 by channel"),
        (CHANNEL, MX, "weight_scale has dtype uint8, expected float32"),
        (MXFP8, PER_CHANNEL, "weight_scale has dtype float32, expected uint8"),
    ],
)
def test_tensors_that_say_something_else(
    tmp_path: Path, weights: dict[str, Any], group: tuple[int, int], message: str
) -> None:
    tensors = Experts(group).tensors(exponents if group == MX else torch.Tensor.clone)
    refused(tmp_path, tensors, config(weights), f"{PREFIX}.0.gate_proj.{message}", "config_groups.group_0")


def test_weights_that_were_not_compressed(tmp_path: Path) -> None:
    """16-bit weights beside their scales: quantization_status "frozen"."""
    tensors = {n: t.to(torch.bfloat16) for n, t in Experts(PER_CHANNEL).tensors().items()}
    assert len(tensors) == 2 * E * len(NAMES)
    refused(
        tmp_path, tensors, config(CHANNEL), f"{PREFIX}.0.gate_proj.weight has dtype bfloat16, expected float8_e4m3fn"
    )
