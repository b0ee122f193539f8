"""MXFP4 experts of models whose config calls them FP8: DeepSeek-V4 and MiMo."""

from __future__ import annotations

import json
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


NVFP4: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "group_size": 16, "moe_quant_algo": "NVFP4"}
LAYERS = {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}}


def nvfp4(matrix: Pairs) -> Tensors:
    """As ModelOpt makes it of DeepSeek-V4: codes, e4m3 scales of 16 columns, a scale of the whole."""
    rows, cols = matrix.q.shape
    one = torch.tensor(0.5)
    return {
        "weight": pairs(matrix.q),
        "weight_scale": torch.ones(rows, cols // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": one,
        "input_scale": one,
    }


@pytest.mark.parametrize("beside", [False, True], ids=["config.json alone", "hf_quant_config.json beside"])
@pytest.mark.parametrize("stated", [{"expert_dtype": "fp4"}, {}], ids=["fp4", "no expert_dtype"])
def test_deepseek_v4_as_nvfp4(tmp_path: Path, stated: dict[str, Any], beside: bool) -> None:
    """ModelOpt's entries beside quant_method fp8 are the experts', which are named as what they are."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    tensors = {
        f"layers.0.ffn.experts.{e}.{names[n]}.{suffix}": tensor
        for e in range(3)
        for n, matrix in Experts().matrices[e].items()
        for suffix, tensor in nvfp4(matrix).items()
    }
    quantization = {**FP8, **({} if beside else {**NVFP4, "quantized_layers": LAYERS}), "moe_quant_algo": "NVFP4"}
    if beside:
        manifest = {"producer": {"name": "modelopt"}, "quantization": {**NVFP4, "quantized_layers": LAYERS}}
        del manifest["quantization"]["moe_quant_algo"]  # type: ignore[attr-defined]
        tmp_path.joinpath("hf_quant_config.json").write_text(json.dumps(manifest))
    found = "layers.0.ffn.experts is quantized as NVFP4 (tensors input_scale F32, weight U8, weight_scale F8_E4M3, "
    refused(tmp_path, tensors, quantization, found, "which is not supported; read are", "MXFP4", **SIZES, **stated)


def test_layers_that_modelopt_has_left_in_mxfp4(tmp_path: Path) -> None:
    experts = Experts()
    tensors = experts.tensors(lambda matrix: deepseek(matrix, "scale"))
    quantization = {**FP8, **NVFP4, "quantized_layers": LAYERS, "expert_dtype": "fp4"}
    check(source(tmp_path, tensors, quantization, **SIZES), experts)
