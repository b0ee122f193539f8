"""AutoRound's exports: GPTQ's and AWQ's tensors under its own config, scales of either sign, some layers' settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_wna16.formats.auto_round import AutoRoundFormat
from moe_wna16_words import SIZES, Codes, Matrix, Tensors, auto_round, awq, check, gptq

KEYS = {(4, True): kInt4Static, (4, False): kInt4StaticAsym, (8, True): kInt8Static, (8, False): kInt8StaticAsym}


def config(experts: Codes, packing: str = "auto_round:auto_gptq", **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": experts.bits,
        "group_size": experts.group,
        "sym": experts.symmetric,
        "data_type": "int",
        "autoround_version": "0.15.1",
        "block_name_to_quantize": "model.layers",
        **changes,
    }


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_auto_gptq(tmp_path: Path, bits: int, symmetric: bool, group: int) -> None:
    """No ``g_idx``, no ``checkpoint_format``; a symmetric group's scale has the sign of its largest weight, or not."""
    experts = Codes(bits, group, symmetric=symmetric, signed=symmetric, low=1, dtype=torch.float16)
    found = source(tmp_path, experts.tensors(auto_round), config(experts), **SIZES)
    assert found.format.name == "AutoRound"
    check(found, experts, KEYS[bits, symmetric].with_group(1, group).with_scale_dtype(torch.float16))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_auto_awq(tmp_path: Path, symmetric: bool) -> None:
    experts = Codes(symmetric=symmetric, signed=symmetric)
    found = source(tmp_path, experts.tensors(awq), config(experts, "auto_round:auto_awq"), **SIZES)
    check(found, experts, KEYS[4, symmetric].with_group(1, 32))


def as_they_are(matrix: Matrix, bits: int) -> Tensors:
    return gptq(matrix, bits, stored=0, g_idx=False)


@pytest.mark.parametrize("changes", [{"packing_format": "auto_round:exllamav2"}, {"backend": "autoround:tritonv2"}])
def test_its_older_packing(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Zero points as they are, under the tool's older name."""
    experts = Codes(symmetric=False)
    quantization = {**config(experts), "quant_method": "intel/auto-round", **changes}
    if "backend" in changes:
        del quantization["packing_format"]
    found = source(tmp_path, experts.tensors(as_they_are), quantization, **SIZES)
    check(found, experts, kInt4StaticAsym.with_group(1, 32))


EXTRA: dict[str, dict[str, Any]] = {
    "names": {
        f"{PREFIX}.{e}.{p}_proj": {"bits": 8, "group_size": 64} for e in range(3) for p in ("gate", "up", "down")
    },
    "pattern": {r".*\.mlp\.experts\..*": {"bits": 8, "group_size": 64}, "model.layers.0.mlp.gate": {"bits": 16}},
    "names before parts": {
        **{f"{PREFIX}.{e}.{p}_proj": {"bits": 8, "group_size": 64} for e in range(3) for p in ("gate", "up", "down")},
        "mlp.experts": {"bits": 2},
    },
    "part": {"mlp.experts": {"bits": 8, "group_size": 64}, "lm_head": {"bits": 16}},
}


@pytest.mark.parametrize("name", EXTRA)
def test_extra_config(tmp_path: Path, name: str) -> None:
    experts = Codes(8, 64)
    quantization = config(experts, bits=4, group_size=128, extra_config=EXTRA[name])
    found = source(tmp_path, experts.tensors(auto_round), quantization, **SIZES)
    check(found, experts, kInt8Static.with_group(1, 64))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({f"{PREFIX}.1.up_proj": {"bits": 16}}, f"bits is 4 for {PREFIX}.0.down_proj and 16 for {PREFIX}.1.up_proj"),
        ({"down_proj": {"sym": False}}, f"sym is False for {PREFIX}.0.down_proj and True for {PREFIX}.0.gate_proj"),
        ({"[": {"bits": 8}}, "extra_config: the key '[' is not a valid regular expression"),
        ({"mlp": {"bits": 3}}, "data_type is 'int' with 3 bits, expected 'int' with 4 or 8"),
        ([], "extra_config is [], expected an object"),
    ],
    ids=["expert", "projection", "pattern", "bits", "type"],
)
def test_extra_config_that_is_refused(tmp_path: Path, extra: Any, message: str) -> None:
    experts = Codes()
    refused(tmp_path, experts.tensors(auto_round), config(experts, extra_config=extra), message, **SIZES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{f"{bits} bits": ({"bits": bits}, f"with {bits} bits, expected 'int' with 4 or 8") for bits in (2, 3, 5, 6, 7)},
    "another type": ({"data_type": "nv_fp"}, "data_type is 'nv_fp' with 4 bits, expected 'int' with 4 or 8"),
    "int8 activations": ({"act_bits": 8}, "act_bits is 8, expected 16"),
    "another packing": (
        {"packing_format": "auto_round:llm_compressor"},
        "packing_format is 'auto_round:llm_compressor'",
    ),
    "8 bits as AWQ": (
        {"packing_format": "auto_round:auto_awq", "bits": 8},
        "'auto_round:auto_awq' with 8 bits, expected 4",
    ),
    "another tool": ({"quant_method": "gptq"}, "quant_method is 'gptq', expected 'auto-round'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    experts = Codes()
    assert message in reason_against(
        AutoRoundFormat(), tmp_path, experts.tensors(auto_round), config(experts, **changes)
    )


def test_a_missing_symmetry_is_the_tools_default(tmp_path: Path) -> None:
    experts = Codes()
    quantization = config(experts)
    del quantization["sym"]
    found = source(tmp_path, experts.tensors(auto_round), quantization, **SIZES)
    check(found, experts, kInt4Static.with_group(1, 32))
