"""MXFP4 experts of models whose config calls them FP8: DeepSeek-V4 and MiMo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import kFp8Static128BlockSym
from moe_core.testing.checkpoints import PREFIX, refused, source
from moe_mxfp4_pairs import SIZES, Experts, Pairs, Tensors, check, pairs, plain

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def deepseek(matrix: Pairs, scale: str) -> Tensors:
    return {"weight": pairs(matrix.q).view(torch.int8), scale: matrix.s.view(torch.float8_e8m0fnu)}


@pytest.mark.parametrize("scale", ["scale", "weight_scale_inv"])
@pytest.mark.parametrize("beside", [False, True])
def test_deepseek_v4(tmp_path: Path, beside: bool, scale: str) -> None:
    experts = Experts()
    tensors = experts.tensors(lambda matrix: deepseek(matrix, scale))
    stated = {"expert_dtype": "fp4"}
    quantization = {**FP8, "fmt": "e4m3", "scale_fmt": "ue8m0", **({} if beside else stated)}
    check(source(tmp_path, tensors, quantization, **SIZES, **(stated if beside else {})), experts)


def test_mimo(tmp_path: Path) -> None:
    experts = Experts()
    quantization = {**FP8, "store_dtype": "MXFP4", "mxfp4_block_size": 32}
    check(source(tmp_path, experts.tensors(plain), quantization, **SIZES), experts)


def test_experts_that_are_fp8_all_the_same(tmp_path: Path) -> None:
    """What is stored as e4m3 is FP8, whatever else the model has."""
    names = [f"{PREFIX}.{e}.{n}_proj" for e in range(3) for n in ("gate", "up", "down")]
    sizes = {"gate": (64, 96), "up": (64, 96), "down": (96, 64)}
    tensors: Tensors = {}
    for name in names:
        rows, cols = sizes[name.rpartition(".")[2].removesuffix("_proj")]
        tensors[f"{name}.weight"] = torch.ones(rows, cols).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.ones(1, 1)
    found = source(tmp_path, tensors, {**FP8, "expert_dtype": "fp4"}, **SIZES)
    assert found.weight_key == kFp8Static128BlockSym


def test_codes_that_nothing_says_are_fp4(tmp_path: Path) -> None:
    refused(tmp_path, Experts().tensors(plain), FP8, f"{PREFIX}.0.gate_proj.weight has", **SIZES)
    quantization = {**FP8, "store_dtype": "nvfp4"}
    refused(tmp_path, Experts().tensors(plain), quantization, "store_dtype is 'nvfp4', expected 'fp8'", **SIZES)
