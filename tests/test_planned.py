"""moe explain of a folder that holds config.json alone: what it says is what it says of the whole checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from moe_core import registry
from moe_kit.commands import Moe

QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
}


@pytest.fixture
def moe(capsys: pytest.CaptureFixture[str]) -> Moe:
    return Moe(capsys)


def written(folder: Path, config: dict[str, Any], quantization: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    entries = config if quantization is None else {**config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("scheme", ["fp8", "int8", "mxfp4", "wna16"])
def test_as_of_the_whole_checkpoint(moe: Any, tmp_path: Path, scheme: str) -> None:
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    whole.mkdir()
    registry().scheme(scheme).write_quickstart(whole)
    alone.mkdir()
    for file in whole.glob("*config*.json"):
        shutil.copy(file, alone)
    first, second = (moe("explain", folder, "--device", "h100", "--json").data for folder in (whole, alone))
    for key in ("scheme", "format", "weight_key", "activation_key", "chosen", "memory", "floor"):
        assert first[key] == second[key]
    assert (first["estimated"], second["estimated"]) == (False, True)
    assert first["fit"]["experts"] == second["fit"]["experts"]
    result = moe("explain", alone, "--device", "h100", "--all-layers")
    assert result.code == 0
    assert result.out.endswith("note: estimated from config.json: the folder holds no weights\n")


def _ct(kind: str, bits: int, strategy: str, name: str, group: int | None = None, inputs: Any = None) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "group_size": group, "symmetric": True}
    weights |= {"dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups, "ignore": ["lm_head"]}


TOKEN = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True}
METHODS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    (
        _ct("float", 8, "channel", "float-quantized", inputs={"type": "float", **TOKEN}),
        "kFp8StaticChannelSym",
        "kFp8DynamicTokenSym",
    ),
    (
        _ct("int", 8, "channel", "int-quantized", inputs={"type": "int", **TOKEN}),
        "kInt8StaticChannelSym",
        "kInt8DynamicTokenSym",
    ),
    (_ct("int", 4, "group", "pack-quantized", 128), "kInt4Static", None),
    (_ct("int", 4, "group", "pack-quantized", 32), "kInt4Static32", None),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, "kInt4Static", None),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "kInt4StaticAsym", None),
    ({"quant_method": "mxfp4"}, "kMxfp4Static", None),
]


@pytest.mark.parametrize(
    ("quantization", "weight_key", "activation_key"),
    METHODS,
    ids=[f"{key}-{q['quant_method']}" for q, key, _ in METHODS],
)
def test_the_method(
    moe: Any, tmp_path: Path, quantization: dict[str, Any], weight_key: str, activation_key: str | None
) -> None:
    config = GPT_OSS if quantization["quant_method"] == "mxfp4" else QWEN3
    result = moe("explain", written(tmp_path / "c", config, quantization), "--device", "h100", "--json")
    assert result.code == 0, result.err
    assert (result.data["weight_key"].partition("[")[0], result.data["activation_key"]) == (weight_key, activation_key)


def test_a_model_of_hundreds_of_gigabytes(moe: Any, tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    folder = written(tmp_path / "c", DEEPSEEK, quantization)
    result = moe("explain", folder, "--device", "h200", "--json")
    assert result.code == 1
    fit = result.data["fit"]
    assert fit["layers"] == 58
    assert fit["experts"] == pytest.approx(58 * 256 * 3 * 7168 * 2048, rel=1e-3)
    # 671e9 parameters in all, less the experts', in 16 bits
    assert fit["other"] == pytest.approx(2 * (671e9 - 58 * 256 * 3 * 7168 * 2048), rel=0.05)
    # the index states it, if it was downloaded
    index = {"metadata": {"total_size": 700_000_000_000}, "weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fit = moe("explain", folder, "--device", "h200", "--json").data["fit"]
    assert fit["other"] + fit["experts"] == pytest.approx(700e9, rel=1e-3)


def test_sixteen_bits(moe: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "c", QWEN3)
    moe.refuses("explain", folder, "--device", "h100", parts=("is not quantized", "--quantize"))
    quantized = moe("explain", folder, "--device", "rtx4090", "--quantize", "int4_g128", "--json")
    assert quantized.code == 0
    assert quantized.data["fit"]["experts"] == pytest.approx(48 * 128 * 3 * 2048 * 768 * (4 + 16 / 128) / 8, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "quantization", "part"),
    [
        ({}, {"quant_method": "fp9"}, "quant_method 'fp9'"),
        ({}, {"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({}, _ct("float", 4, "tensor_group", "nvfp4-pack-quantized", 16), "NVFP4"),
        ({"num_experts": "many"}, {"quant_method": "fp8"}, "num_experts is 'many'"),
        ({"num_hidden_layers": None}, {"quant_method": "fp8"}, "num_hidden_layers"),
        ({"mlp_only_layers": list(range(48))}, {"quant_method": "fp8"}, "a layer with experts"),
    ],
)
def test_what_config_json_does_not_tell(
    moe: Any, tmp_path: Path, changes: dict[str, Any], quantization: dict[str, Any], part: str
) -> None:
    moe.refuses("explain", written(tmp_path / "c", {**QWEN3, **changes}, quantization), parts=(part,))


def test_a_download_that_stopped_is_no_plan(moe: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "c", QWEN3, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (folder / "model.safetensors.incomplete").write_bytes(b"")
    moe.refuses("explain", folder, parts=("the download is not complete",))
    moe.refuses("run", folder, parts=("no *.safetensors",))
