"""AWQ: words of rows in an order of their own, zero points as they are, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import kInt4Static, kInt4StaticAsym
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_wna16.formats.awq import AwqFormat
from moe_wna16_words import SIZES, Codes, Matrix, Tensors, awq, check
from torch import Tensor


def config(experts: Codes, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": experts.group,
        "version": "gemm",
        "zero_point": not experts.symmetric,
        "modules_to_not_convert": ["gate"],
        **changes,
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_zero_points(tmp_path: Path, group: int, dtype: torch.dtype) -> None:
    experts = Codes(group=group, symmetric=False, dtype=dtype)
    found = source(tmp_path, experts.tensors(awq), config(experts), **SIZES)
    assert found.format.name == "AWQ"
    check(found, experts, kInt4StaticAsym.with_group(1, group).with_scale_dtype(dtype))


def without_zeros(matrix: Matrix, bits: int) -> Tensors:
    return {suffix: tensor for suffix, tensor in awq(matrix, bits).items() if suffix != "qzeros"}


@pytest.mark.parametrize("write", [awq, without_zeros], ids=["with", "without"])
def test_no_zero_points(tmp_path: Path, write: Any) -> None:
    experts = Codes()
    check(source(tmp_path, experts.tensors(write), config(experts), **SIZES), experts, kInt4Static.with_group(1, 32))


def test_rows_that_do_not_fill_words(tmp_path: Path) -> None:
    experts = Codes(symmetric=False)
    tensors = {
        n: t[:-1].contiguous() if "down" not in n and t.shape[0] == 96 else t for n, t in experts.tensors(awq).items()
    }
    sizes = {"hidden_size": 95, "moe_intermediate_size": 48}
    message = "down_proj.qweight has 95 rows, expected a multiple of 8"
    refused(tmp_path / "a", tensors, config(experts), message, **sizes)
    message = "gate_proj.qweight has 44 rows, expected a multiple of 8"
    refused(tmp_path / "b", experts.tensors(awq), config(experts), message, hidden_size=96, moe_intermediate_size=44)


def test_the_names_that_tools_give_to_settings(tmp_path: Path) -> None:
    """AutoAWQ's older names, GPTQModel's, capitals."""
    experts = Codes(symmetric=False, group=64)
    key = kInt4StaticAsym.with_group(1, 64)
    for number, changes in enumerate(
        (
            {"w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            {"bits": 4, "group_size": 64, "checkpoint_format": "gemm", "format": "gemm", "desc_act": False},
            {"bits": 4, "group_size": 64, "version": "gemm", "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "sym": False},
            # before 5.7 it wrote a default that says nothing
            {"bits": 4, "group_size": 64, "version": "gemm", "meta": {"quantizer": ["gptqmodel:5.6.12"]}, "sym": True},
        )
    ):
        quantization = {"quant_method": "awq", "zero_point": True, **changes}
        found = source(tmp_path / str(number), experts.tensors(awq), quantization, **SIZES)
        check(found, experts, key)


UP = f"{PREFIX}.0.up_proj"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{bits} bits": ({"bits": bits}, f"bits is {bits}, expected 4") for bits in (2, 3, 5, 6, 7, 8)},
    "gemv": ({"version": "gemv"}, "version is 'gemv', expected 'gemm'"),
    "gemv_fast": ({"version": "GEMV_FAST"}, "version is 'gemv_fast', expected 'gemm'"),
    "marlin": ({"version": None, "format": "marlin"}, "format is 'marlin', expected 'gemm'"),
    "no group": ({"group_size": None}, "group_size is None, expected the columns of a group, or -1 for all"),
    "another tool": ({"quant_method": "gptq"}, "quant_method is 'gptq', expected 'awq'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    experts = Codes(symmetric=False)
    assert message in reason_against(AwqFormat(), tmp_path, experts.tensors(awq), config(experts, **changes))


BROKEN: dict[str, tuple[str, Any, str]] = {
    "groups of scales": ("scales", lambda t: t[:2].contiguous(), f"{UP}.scales has shape [2, 48], expected [3, 48]"),
    "groups of zero points": ("qzeros", lambda t: t[:1].contiguous(), f"{UP}.qzeros has shape [1, 6], expected [3, 6]"),
    "words": ("qweight", lambda t: t.mT.contiguous(), f"{UP}.qweight has shape [6, 96], expected [96, 6]"),
    "infinite": ("scales", lambda t: t / 0, f"{UP}.scales has 144 NaN or Inf values of 144, first at [0, 0]"),
    "activation order": ("qweight", None, f"{UP}.g_idx is I32: experts of this format have no such tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str) -> None:
    suffix, change, message = BROKEN[name]
    experts = Codes(symmetric=False)
    tensors: dict[str, Tensor] = {}
    for key, tensor in experts.tensors(awq).items():
        hit = key.endswith(f"up_proj.{suffix}")
        tensors[key] = change(tensor) if hit and change is not None else tensor
        if hit and change is None:
            tensors[key.replace(suffix, "g_idx")] = torch.zeros(96, dtype=torch.int32)
    refused(tmp_path, tensors, config(experts), message, **SIZES)


def test_zero_points_that_contradict_symmetry(tmp_path: Path) -> None:
    experts = Codes(symmetric=False)
    quantization = config(experts, zero_point=False)
    refused(tmp_path, experts.tensors(awq), quantization, "expected 8 everywhere: weights are symmetric", **SIZES)
