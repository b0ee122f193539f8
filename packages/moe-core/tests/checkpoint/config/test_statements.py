"""Files and entries that say the same of a checkpoint's quantization, and such that contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint
from moe_core_checkpoints import write

Json = dict[str, Any]


def read(folder: Path, config: Json, **beside: Json) -> Json:
    """What is said by config.json and files ``beside`` it."""
    write(folder, {"a": torch.zeros(1)}, {}, **config)
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return dict(Checkpoint.open(folder).quantization)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "zp_dtype": None}}}


@pytest.mark.parametrize(
    ("config", "beside"),
    [
        ({"quantization_config": GPTQ}, {"quantize_config": {"bits": 4, "desc_act": True, "sym": None}}),
        ({"quantization_config": {**GPTQ, "method": "gptq", "format": "gptq_v2"}}, {}),
        ({"quantization_config": {**GPTQ, "damp_percent": 0.1}}, {"quantize_config": {"damp_percent": 0.01}}),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}},
            {"quant_config": {"w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True}},
        ),
        (
            {"quantization_config": {**GPTQ, "meta": {"quantizer": ["gptqmodel:1.4"]}}},
            {"quantize_config": {"meta": {"quantizer": "gptqmodel:1.5", "damp_percent": 1}}},
        ),
        (
            {"quantization_config": {"quant_method": "modelopt_mixed", "quant_algo": "fp8"}},
            {"hf_quant_config": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}},
        ),
        (
            {"quantization_config": {"config_groups": GROUPS}, "compression_config": {"config_groups": GROUPS}},
            {},
        ),
        (
            {
                "quantization_config": {"config_groups": GROUPS},
                "text_config": {
                    "quantization_config": {"config_groups": {"group_0": {**GROUPS["group_0"], "x": None}}}
                },
            },
            {},
        ),
        (
            {"quantization_config": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}},
            {"quantization_config": {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}},
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "moe_quant_algo": "NVFP4"}},
            {"hf_quant_config": {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}}},
        ),
        ({"quantization_config": {"quant_method": "acme", "quant_algo": "FP8", "config_groups": 3}}, {}),
    ],
    ids=[
        *("left out", "synonyms", "entries that decide nothing", "older names", "versions of a tool", "letter case"),
        *("both names", "text part", "packing", "experts of another tool"),
        "unknown tool",
    ],
)
def test_what_agrees(tmp_path: Path, config: Json, beside: Json) -> None:
    found = read(tmp_path, config, **beside)
    assert found.items() >= {k: v for k, v in config["quantization_config"].items() if k != "config_groups"}.items()


def test_what_one_file_leaves_out_is_the_others(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "sym": None}}
    assert read(tmp_path, config, quantize_config={"group_size": 32, "sym": False}) == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": False,
    }


@pytest.mark.parametrize(
    ("config", "also", "message"),
    [
        (
            GPTQ,
            {"format": "gptq"},
            "quantization_config.checkpoint_format",
        ),
        (
            GPTQ,
            {"method": "awq"},
            "quantization_config.quant_method",
        ),
        (GPTQ, {"w_bit": 8}, "quantization_config.bits"),
        (GPTQ, {"q_group_size": 64}, "group_size"),
        (GPTQ, {"zero_point": False}, "sym"),
        (GPTQ, {"symmetric": True}, "sym"),
        (
            {"quant_method": "awq", "version": "gemm"},
            {"format": "gemv"},
            "format",
        ),
        (
            {"quant_method": "auto-round", "backend": "auto_round:awq"},
            {"packing_format": "auto_round:auto_gptq"},
            "packing_format",
        ),
        (
            {"quant_method": "mxfp4"},
            {"quant_algo": "FP8"},
            "quant_algo",
        ),
        ({"quant_method": "mxfp4"}, {"global_quant_config": {}}, "global_quant_config"),
        ({"quant_method": "mxfp4"}, {"act_bits": 8}, "act_bits"),
        ({"quant_method": "fp8"}, {"config_groups": GROUPS}, "compressed-tensors"),
        (MODELOPT, {"global_quant_config": {"weight": {}}}, "quark"),
        (
            {"quant_method": "quark"},
            {"activation_scheme": "static"},
            "w8a8_fp8",
        ),
    ],
)
def test_entries_that_contradict_each_other(tmp_path: Path, config: Json, also: Json, message: str) -> None:
    read(tmp_path / "alone", {"quantization_config": config})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(tmp_path / "both", {"quantization_config": {**config, **also}})


@pytest.mark.parametrize(
    ("config", "file", "other", "message"),
    [
        (GPTQ, "quantize_config", {"checkpoint_format": "gptq"}, "quantize_config.json.checkpoint_format"),
        (GPTQ, "quantize_config", {"desc_act": True, "bits": 8}, "quantize_config.json.bits is 8"),
        (GPTQ, "quantize_config", {"dynamic": {".*": {}}, "sym": True}, "quantize_config.json.sym"),
        (GPTQ, "quant_config", {"w_bit": 8}, "quant_config.json.w_bit is 8"),
        (GPTQ, "quantization_config", {"group_size": 128}, "quantization_config.json.group_size is 128"),
        (
            MODELOPT,
            "hf_quant_config",
            {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
            "quantization_config.quant_algo",
        ),
        (
            {"quant_method": "fp8"},
            "hf_quant_config",
            {"quantization": {"quant_algo": "FP8"}},
            "hf_quant_config.json",
        ),
        (
            {"quant_method": "gptq", "meta": {"quantizer": ["gptqmodel:1"]}},
            "quantize_config",
            {"meta": {"quantizer": "auto-gptq:1"}},
            "quantize_config.json.meta is",
        ),
        (
            MODELOPT,
            "hf_quant_config",
            {"quantization": 5},
            "hf_quant_config.json",
        ),
    ],
)
def test_files_that_contradict_each_other(tmp_path: Path, config: Json, file: str, other: Json, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(tmp_path, {"quantization_config": config}, **{file: other})


def test_a_method_is_a_name(tmp_path: Path) -> None:
    for method in ("x" * 101, 5, ["gptq"]):
        with pytest.raises(CheckpointError, match="quant_method"):
            read(tmp_path, {"quantization_config": {"quant_method": method}})


@pytest.mark.parametrize("place", ["compression_config", "text_config", "llm_config", "thinker_config"])
def test_parts_of_config_json_that_contradict_each_other(tmp_path: Path, place: str) -> None:
    other: Json = {"bits": 8}
    inner = other if place == "compression_config" else {"quantization_config": other}
    with pytest.raises(CheckpointError, match=rf"{place}.*\.bits is 8"):
        read(tmp_path, {"quantization_config": GPTQ, place: inner})
