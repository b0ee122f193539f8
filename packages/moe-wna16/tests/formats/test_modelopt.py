"""ModelOpt's W4A16_AWQ: two rows in a byte, factors of the inputs' columns, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import kInt4Static
from moe_core.testing.checkpoints import NAMES, PREFIX, reason_against, refused, source
from moe_wna16.formats.modelopt import ModelOptAwqFormat
from moe_wna16_words import SIZES, Codes, K, N, check, row_pairs

KEY = kInt4Static.with_group(1, 32).with_scale_dtype(torch.float32)
CONFIG: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_AWQ",
    "group_size": 32,
    "has_zero_point": False,
    "pre_quant_scale": True,
    "exclude_modules": ["lm_head"],
}


def factors(expert: int, projection: str) -> torch.Tensor:
    """Of both signs, exact in bfloat16."""
    size = N if projection == "down_proj" else K
    return (torch.arange(size) % 7 - 3.5 + expert).bfloat16() / 4


def with_factors(tensors: dict[str, torch.Tensor], *projections: str) -> dict[str, torch.Tensor]:
    return tensors | {f"{PREFIX}.{e}.{p}.pre_quant_scale": factors(e, p) for e in range(3) for p in projections}


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "w4a16_awq"])
def test_rows_in_bytes(tmp_path: Path, algorithm: str, group: int) -> None:
    """Without factors: smoothing may be folded into the layer before."""
    experts = Codes(group=group, hidden=90, inter=46, dtype=torch.float32)
    sizes = {"hidden_size": 90, "moe_intermediate_size": 46}
    quantization = {**CONFIG, "quant_algo": algorithm, "group_size": group}
    found = source(tmp_path, experts.tensors(row_pairs), quantization, **sizes)
    assert found.format.name == "ModelOpt AWQ"
    check(found, experts, KEY.with_group(1, group))


def test_an_odd_number_of_rows(tmp_path: Path) -> None:
    odd = Codes(hidden=91, dtype=torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    gate_and_up = {f"{PREFIX}.{e}.{NAMES[n]}": odd.matrices[e][n] for e in range(3) for n in ("gate", "up")}
    for name, matrix in gate_and_up.items():
        tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in row_pairs(matrix, 4).items()}
    even = Codes(dtype=torch.float32).tensors(row_pairs)
    tensors |= {name: tensor for name, tensor in even.items() if "down_proj" in name}
    message = "down_proj.weight has 91 rows, expected a multiple of 2"
    refused(tmp_path, tensors, CONFIG, message, hidden_size=91, moe_intermediate_size=48)


def test_factors_of_inputs(tmp_path: Path) -> None:
    experts = Codes(dtype=torch.float32)
    tensors = with_factors(experts.tensors(row_pairs), "gate_proj", "up_proj", "down_proj")
    found = source(tmp_path, tensors, CONFIG, **SIZES)
    check(found, experts, replace(KEY, pre_scaled=True))
    weights = found.weights()
    assert weights.w13_pre_scale is not None
    assert weights.w2_pre_scale is not None
    assert weights.w13_pre_scale.dtype is torch.float32
    for expert in range(3):
        assert torch.equal(weights.w13_pre_scale[expert], factors(expert, "gate_proj").float())
        assert torch.equal(weights.w2_pre_scale[expert], factors(expert, "down_proj").float())


def test_factors_of_one_matrix(tmp_path: Path) -> None:
    """Those of gate and up are often folded into the norm before; the others count as 1."""
    experts = Codes(dtype=torch.float32)
    found = source(tmp_path, with_factors(experts.tensors(row_pairs), "down_proj"), CONFIG, **SIZES)
    check(found, experts, replace(KEY, pre_scaled=True))
    weights = found.weights()
    assert weights.w13_pre_scale is not None
    assert bool((weights.w13_pre_scale == 1).all())


def test_gate_and_up_whose_factors_differ(tmp_path: Path) -> None:
    tensors = with_factors(Codes(dtype=torch.float32).tensors(row_pairs), "gate_proj", "up_proj", "down_proj")
    name = f"{PREFIX}.1.up_proj.pre_quant_scale"
    tensors[name] = tensors[name].clone()
    tensors[name][17] = 3
    refused(
        tmp_path / "a",
        tensors,
        CONFIG,
        f"{name} is 3 at [17], expected {float(factors(1, 'gate_proj')[17]):g} as {PREFIX}.1.gate_proj.pre_quant_scale",
        **SIZES,
    )
    only_gate = with_factors(Codes(dtype=torch.float32).tensors(row_pairs), "gate_proj")
    refused(tmp_path / "b", only_gate, CONFIG, f"{PREFIX}.0.up_proj.pre_quant_scale is missing", **SIZES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "W4A8": ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ', expected W4A16_AWQ"),
    "zero points": ({"has_zero_point": True}, "has_zero_point is true, expected false"),
    "another tool": ({"quant_method": "acme"}, "quant_method is 'acme', expected 'modelopt'"),
    "no algorithm": ({"quant_algo": None}, "quant_algo is None, expected an algorithm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    tensors = Codes(dtype=torch.float32).tensors(row_pairs)
    assert message in reason_against(ModelOptAwqFormat(), tmp_path, tensors, {**CONFIG, **changes})


UP = f"{PREFIX}.0.up_proj"
BROKEN: dict[str, tuple[str, Any, str]] = {
    "groups of scales": (
        "weight_scale",
        lambda t: t[:, :2].contiguous(),
        f"{UP}.weight_scale has shape [48, 2], expected",
    ),
    "rows": ("weight", lambda t: torch.cat([t, t]), f"{UP}.weight has shape [48, 96], expected [24, 96]"),
    "type": ("weight", lambda t: t.to(torch.int8), f"{UP}.weight has dtype int8, expected uint8"),
    "NaN": ("weight_scale", lambda t: t * float("nan"), f"{UP}.weight_scale has 144 NaN or Inf values of 144"),
    "factors": (
        "pre_quant_scale",
        lambda t: t[:-1].contiguous(),
        f"{UP}.pre_quant_scale has shape [95], expected [96]",
    ),
    "NaN factors": ("pre_quant_scale", lambda t: t / 0, f"{UP}.pre_quant_scale has 96 NaN or Inf values of 96"),
    "second scale": ("weight_scale", None, f"{UP}.weight_scale_2 is F32: experts of this format have no such tensor"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str) -> None:
    suffix, change, message = BROKEN[name]
    tensors = with_factors(Codes(dtype=torch.float32).tensors(row_pairs), "gate_proj", "up_proj", "down_proj")
    for key in [key for key in tensors if key.endswith(f"up_proj.{suffix}")]:
        if change is None:
            tensors[f"{key}_2"] = torch.ones(())
        else:
            tensors[key] = change(tensors[key])
    refused(tmp_path, tensors, CONFIG, message, **SIZES)
