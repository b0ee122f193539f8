"""ModelOpt's algorithms, in both of its files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, QuantKey
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core.spec.quant_key import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
    kMxfp8Static,
)
from moe_core.testing.checkpoints import (
    CONFIG,
    MX,
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
    write,
)
from moe_fp8.formats.modelopt import ModelOptFp8Format
from torch import Tensor

ALGORITHMS: dict[str, tuple[tuple[int, int], QuantKey, QuantKey | None]] = {
    "FP8": (PER_TENSOR, kFp8StaticTensorSym, kFp8StaticTensorSym),
    "FP8_PER_CHANNEL_PER_TOKEN": (PER_CHANNEL, kFp8StaticChannelSym, kFp8DynamicTokenSym),
    "FP8_PB_WO": ((128, 128), kFp8Static128BlockSym, None),
    "MXFP8": (MX, kMxfp8Static, kMxfp8Dynamic),
}


def tensors_of(algorithm: str, experts: Experts) -> dict[str, Tensor]:
    """As ModelOpt stores them: [], [N], [N/128, 1, K/128, 1], uint8 [N, K/32]."""
    extra = {"input_scale": torch.tensor(0.5)} if algorithm == "FP8" else None

    def store(scale: Tensor) -> Tensor:
        if algorithm == "FP8":
            return scale.reshape(())
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return scale.flatten()
        return exponents(scale) if algorithm == "MXFP8" else scale[:, None, :, None]

    return experts.tensors(store, extra=extra)


@pytest.mark.parametrize("spelling", [str.upper, str.lower, str.title], ids=["upper", "lower", "title"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms(tmp_path: Path, algorithm: str, spelling: Any) -> None:
    group, weight_key, activation_key = ALGORITHMS[algorithm]
    experts = Experts(group)
    quantization = {"quant_method": "modelopt", "quant_algo": spelling(algorithm)}
    check(source(tmp_path, tensors_of(algorithm, experts), quantization), experts, weight_key, activation_key)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_its_own_file(tmp_path: Path, algorithm: str) -> None:
    """hf_quant_config.json alone."""
    group, weight_key, activation_key = ALGORITHMS[algorithm]
    experts = Experts(group)
    write(tmp_path, tensors_of(algorithm, experts), CONFIG)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    check(read_layer(Checkpoint.open(tmp_path)), experts, weight_key, activation_key)


@pytest.mark.parametrize("key", [None, kFp8DynamicTokenSym], ids=str)
def test_other_activations_need_no_static_scale(tmp_path: Path, key: QuantKey | None) -> None:
    experts = Experts(PER_TENSOR)
    tensors = experts.tensors(lambda scale: scale.reshape(()))
    write(tmp_path, tensors, {**CONFIG, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    checkpoint = Checkpoint.open(tmp_path)
    check(read_layer(checkpoint, activation_key=key), experts, kFp8StaticTensorSym, key)
    with pytest.raises(CheckpointError, match=r"gate_proj\.input_scale"):
        read_layer(checkpoint).check_fits()


def test_config_groups_are_not_believed(tmp_path: Path) -> None:
    """ModelOpt writes dynamic: false for every activation there."""
    args = {"dynamic": False, "num_bits": 8, "type": "float"}
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
        "config_groups": {"group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}},
        "ignore": ["lm_head.\0backbone.pt_name_sentinel", f"{PREFIX}*"],
    }
    experts = Experts(PER_CHANNEL)
    tensors = tensors_of("FP8_PER_CHANNEL_PER_TOKEN", experts)
    check(source(tmp_path, tensors, quantization), experts, kFp8StaticChannelSym, kFp8DynamicTokenSym)


@pytest.mark.parametrize(
    "layers",
    [
        {
            f"{PREFIX}.{expert}.{name}": {"quant_algo": "FP8_PB_WO"}
            for expert in range(3)
            for name in ("gate_proj", "up_proj", "down_proj")
        },
        {PREFIX: {"quant_algo": "fp8_pb_wo"}, "model.layers.0": {"quant_algo": "NVFP4"}},
        {"model.layers.*.mlp.experts*": {"quant_algo": "FP8_PB_WO"}},
    ],
    ids=["modules", "block", "pattern"],
)
def test_mixed_precision(tmp_path: Path, layers: dict[str, Any]) -> None:
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    experts = Experts((128, 128))
    check(source(tmp_path, tensors_of("FP8_PB_WO", experts), quantization), experts, kFp8Static128BlockSym, None)


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("FP8_BLOCK_SCALES", kFp8Dynamic128Sym), ("fp8_pb", kFp8Dynamic128Sym), ("fp8_pb_real", None)],
)
def test_other_names_of_blocks(tmp_path: Path, algorithm: str, key: QuantKey | None) -> None:
    experts = Experts((128, 128))
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm}
    check(source(tmp_path, tensors_of("FP8_PB_WO", experts), quantization), experts, kFp8Static128BlockSym, key)


def test_other_blocks(tmp_path: Path) -> None:
    experts = Experts((64, 64))
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 64}
    tensors = tensors_of("FP8_PB_WO", experts)
    check(source(tmp_path, tensors, quantization), experts, kFp8Static128BlockSym.with_group(64, 64), None)


MIXED = {"quant_algo": "MIXED_PRECISION"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "algorithm": (
        {"quant_algo": "FP9"},
        "quant_algo is 'FP9', expected FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, FP8_PB_REAL",
    ),
    "nvfp4": ({"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', expected"),
    "none": ({"quant_algo": None}, "quant_algo is None, expected an algorithm"),
    "number": ({"quant_algo": 8}, "quant_algo is 8, expected a name"),
    "group": ({"quant_algo": "MXFP8", "group_size": 16}, "group_size is 16 for MXFP8, expected 32"),
    "mixed": (MIXED, "quantized_layers is None, expected an object, since quant_algo is MIXED_PRECISION"),
    "mixed, other layers": (
        {**MIXED, "quantized_layers": {"model.layers.1": {"quant_algo": "FP8"}}},
        f"quantized_layers has no entry for {PREFIX}.0.down_proj or a module that contains it",
    ),
    "mixed experts": (
        {
            **MIXED,
            "quantized_layers": {PREFIX: {"quant_algo": "FP8"}, f"{PREFIX}.0.up_proj": {"quant_algo": "NVFP4"}},
        },
        f"the experts of {PREFIX} are quantized by FP8 and by NVFP4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    tensors = tensors_of("FP8", Experts(PER_TENSOR))
    assert message in reason_against(ModelOptFp8Format(), tmp_path, tensors, {"quant_method": "modelopt", **change})


@pytest.mark.parametrize(("stored", "stated"), list(itertools.permutations(ALGORITHMS, 2)))
def test_tensors_of_another_algorithm(tmp_path: Path, stored: str, stated: str) -> None:
    tensors = tensors_of(stored, Experts(ALGORITHMS[stored][0]))
    name = f"{PREFIX}.0.gate_proj.weight_scale"
    refused(
        tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": stated}, name, "expected", f"quant_algo {stated}"
    )


def test_experts_without_activation_scales(tmp_path: Path) -> None:
    tensors = tensors_of("FP8", Experts(PER_TENSOR))
    tensors = {name: t for name, t in tensors.items() if not name.endswith("input_scale")}
    assert len(tensors) == 6 * E
    refused(
        tmp_path,
        tensors,
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        f"{PREFIX}.0.gate_proj.input_scale is missing",
    )
