"""One scale per tensor under ``quant_method: fp8``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import QuantKey
from moe_core.spec.quant_key import kFp8DynamicTensorSym, kFp8DynamicTokenSym, kFp8StaticTensorSym
from moe_core.testing.checkpoints import PER_TENSOR, PREFIX, Experts, check, reason_against, refused, source
from moe_fp8.formats.fp8_tensor import Fp8TensorFormat

FP8 = {"quant_method": "fp8"}


@pytest.mark.parametrize("scheme", [None, "dynamic", "static"])
@pytest.mark.parametrize(
    ("scale", "activation", "dynamic"),
    [
        ("weight_scale", "input_scale", kFp8DynamicTensorSym),
        ("weight_scale", "act_scale", kFp8DynamicTensorSym),
        ("weight_scale_inv", "activation_scale", kFp8DynamicTokenSym),
    ],
    ids=["AutoFP8", "AutoFP8 before June 2024", "transformers"],
)
def test_both_tools(tmp_path: Path, scale: str, activation: str, dynamic: QuantKey, scheme: str | None) -> None:
    """The tools differ in what a dynamic scale spans."""
    experts = Experts(PER_TENSOR)
    static = scheme == "static"
    extra = {activation: torch.tensor(0.25)} if static else None
    tensors = experts.tensors(lambda s: s.reshape(()), scale, extra=extra)
    quantization: dict[str, Any] = {**FP8, "weight_block_size": None}
    if scheme is not None:
        quantization["activation_scheme"] = scheme
    found = source(tmp_path, tensors, quantization)
    check(found, experts, kFp8StaticTensorSym, kFp8StaticTensorSym if static else dynamic)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "fbgemm_fp8"}, "quant_method is 'fbgemm_fp8', expected 'fp8'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2', expected 'e4m3'"),
        ({"activation_scheme": "fixed"}, "activation_scheme is 'fixed', expected 'dynamic' or 'static'"),
        ({"weight_block_size": [128, 128]}, "weight_block_size is given (one scale per block), expected null"),
    ],
)
def test_other_formats(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = Experts(PER_TENSOR).tensors()
    assert message in reason_against(Fp8TensorFormat(), tmp_path, tensors, {**FP8, **change})


def test_tensors_in_blocks(tmp_path: Path) -> None:
    """weight_block_size forgotten: the grid is no scalar."""
    tensors = Experts((128, 128)).tensors(suffix="weight_scale_inv")
    message = f"{PREFIX}.0.gate_proj.weight_scale_inv has shape [2, 3], expected [] (one scale per tensor: weight_block"
    refused(tmp_path, tensors, FP8, message)
