"""AutoRound's MXFP4 with 16-, 8- and 4-bit activations, and settings of some layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from moe_core import QuantKey, kMxfp4Dynamic, kMxfp4DynamicDown, kMxfp8Dynamic, kMxfp8DynamicDown
from moe_core.testing.checkpoints import PREFIX, reason_against, refused, source
from moe_mxfp4.formats.auto_round import AutoRoundMxfp4Format
from moe_mxfp4_pairs import SIZES, Experts, check, packed

BASE = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:llm_compressor",
    "data_type": "mx_fp",
    "bits": 4,
    "group_size": 32,
    "sym": True,
}
MX4 = {**BASE, "act_bits": 4, "act_data_type": "mx_fp_rceil", "act_group_size": 32, "act_dynamic": True}

CONFIGS: dict[str, tuple[dict[str, Any], QuantKey | None]] = {
    "weights": (BASE, None),
    "16 bits": ({**BASE, "act_bits": 16, "act_data_type": "float"}, None),
    "mxfp4 rounded up": (MX4, kMxfp4Dynamic),
    "mxfp4": ({**MX4, "act_data_type": "mx_fp"}, kMxfp4DynamicDown),
    "mxfp8": ({**MX4, "act_bits": 8, "act_data_type": "mx_fp"}, kMxfp8DynamicDown),
    "mxfp8 rounded up": ({**MX4, "act_bits": 8}, kMxfp8Dynamic),
    "type left out": ({**BASE, "act_bits": 4}, kMxfp4DynamicDown),
    "older name": ({**MX4, "quant_method": "intel/auto-round", "data_type": "mx_fp4"}, kMxfp4Dynamic),
    "other layers": ({**MX4, "extra_config": {"lm_head": {"bits": 16}, ".*self_attn.*": {"bits": 8}}}, kMxfp4Dynamic),
    "experts alone": (
        {**MX4, "bits": 8, "act_bits": 8, "extra_config": {".*experts.*": {"bits": 4, "act_bits": 16}}},
        None,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(tmp_path: Path, name: str) -> None:
    quantization, key = CONFIGS[name]
    experts = Experts(bias=True)
    check(source(tmp_path, experts.tensors(packed), quantization, **SIZES), experts, key)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "gptq"}, "quant_method is 'gptq', expected 'auto-round'"),
    "bits": ({**BASE, "bits": 8}, "data_type is 'mx_fp' with 8 bits, expected 'mx_fp' with 4"),
    "int": ({**BASE, "data_type": "int"}, "data_type is 'int' with 4 bits, expected 'mx_fp' with 4"),
    "nvfp4": ({**BASE, "data_type": "nv_fp"}, "data_type is 'nv_fp' with 4 bits, expected 'mx_fp' with 4"),
    "group": ({**BASE, "group_size": 16}, "group_size is 16, expected 32"),
    "activations": ({**MX4, "act_bits": 6}, "act_data_type is 'mx_fp_rceil' with 6 bits, expected 'mx_fp' with 4, 8"),
    "int8 activations": ({**MX4, "act_bits": 8, "act_data_type": "int"}, "act_data_type is 'int' with 8 bits, expec"),
    "another rounding": ({**MX4, "act_data_type": "mx_fp4_rceil_v2"}, "act_data_type is 'mx_fp4_rceil_v2' with 4 bits"),
    "groups of activations": ({**MX4, "act_group_size": 16}, "act_group_size is 16, expected 32"),
    "static": ({**MX4, "act_dynamic": False}, "act_dynamic is false, expected true"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(tmp_path: Path, name: str) -> None:
    quantization, message = REFUSED[name]
    assert message in reason_against(AutoRoundMxfp4Format(), tmp_path, Experts().tensors(packed), quantization)


def test_projections_that_differ(tmp_path: Path) -> None:
    quantization = {**MX4, "extra_config": {".*down_proj": {"act_bits": 16}}}
    message = f"act_bits is 16 for {PREFIX}.0.down_proj and 4 for {PREFIX}.0.gate_proj; all matrices of a layer's"
    refused(tmp_path, Experts().tensors(packed), quantization, message, **SIZES)
