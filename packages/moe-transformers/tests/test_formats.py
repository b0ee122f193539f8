"""Whole tiny models, each linear layer and expert in one tool's format, against the same model with the codes' values.

In float32, with activations that are not quantized, both compute the same numbers, but for the order of sums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_transformers import MoeCoreExperts
from moe_transformers_checkpoints import FORMATS, N, checkpoint, logits, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

#: families and formats in turns
PAIRS = [
    ("qwen3_moe", "fp8 block"),
    ("mixtral", "compressed-tensors fp8"),
    ("glm4_moe", "compressed-tensors int8"),
    ("deepseek_v3", "compressed-tensors w4a16"),
    ("qwen3_moe", "compressed-tensors w4a8"),
    ("nemotron_h", "compressed-tensors mxfp8"),
    ("deepseek_v3", "compressed-tensors mxfp4"),
    ("mixtral", "modelopt fp8"),
    ("qwen3_moe", "gptq"),
    ("mixtral", "awq"),
    ("glm4_moe", "auto-round"),
    ("nemotron_h", "quark"),
    ("gpt_oss", "mxfp4"),
    ("deepseek_v3", "fp8 block"),
]
#: roundings of float32 in sums of at most a hundred products, in some thirty such sums one after the other
BOUND = 100 * 30 * 2.0**-24
#: int4 weights of that scheme have int8 activations: off by half a step of 1/127 of a token's largest value, which is
#: at most sqrt(N) times its mean square, in two matrices of two layers
BOUND_INT8 = 4 * N**0.5 / (2 * 127)


def test_every_format_is_there() -> None:
    assert {form for _, form in PAIRS} == FORMATS.keys()


@pytest.mark.parametrize(("family", "form"), PAIRS)
def test_logits_are_those_of_the_codes_values(tmp_path: Path, family: str, form: str) -> None:
    quantized, plain = checkpoint(tmp_path, family, form)
    int8 = form.endswith("w4a8")
    with moe_transformers.loading(activation_key="checkpoint" if int8 else None):
        model, info = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    experts = [module for module in model.modules() if isinstance(module, MoeCoreExperts)]
    assert experts
    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = logits(reference, tokens())
    error = (logits(model, tokens()) - expected).norm() / expected.norm()
    assert error < (BOUND_INT8 if int8 else BOUND)


def quantizes_outputs(folder: Path, form: str) -> None:
    """Queries, keys and values in FP8, as tools write it for attention and its cache."""
    stored = load_file(folder / "model.safetensors")
    scales = {
        name.replace(".weight_scale", ".output_scale"): torch.tensor(0.25)
        for name in stored
        if name.endswith(("q_proj.weight_scale", "k_proj.weight_scale", "v_proj.weight_scale"))
    }
    assert scales
    save_file(stored | scales, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    told: dict[str, Any] = config["quantization_config"]
    if form == "quark":
        outputs = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
        layer = {**told["global_quant_config"], "output_tensors": outputs}
        told["layer_quant_config"] = {f"*{part}_proj": layer for part in "qkv"}
        told["export"]["kv_cache_group"] = ["*k_proj", "*v_proj"]
    else:
        outputs = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
        group = told["config_groups"]["group_0"]
        targets = [rf"re:.*self_attn\.{part}_proj" for part in "qkv"]
        told["config_groups"]["group_1"] = {**group, "targets": targets, "output_activations": outputs}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["quark", "compressed-tensors fp8"])
def test_outputs_of_attention_are_no_matter_of_the_weights(tmp_path: Path, form: str) -> None:
    quantized, plain = checkpoint(tmp_path, "qwen3_moe", form)
    quantizes_outputs(quantized, form)
    with moe_transformers.loading(activation_key=None):
        model, info = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), tokens())
    assert (logits(model, tokens()) - expected).norm() / expected.norm() < BOUND


#: e4m3 rounds a value to 4 significant bits, by at most 2^-4 of itself, in two matrices of two layers
BOUND_FP8 = 4 * 2.0**-4


def test_activations_are_what_the_checkpoint_says(tmp_path: Path) -> None:
    quantized, plain = checkpoint(tmp_path, "mixtral", "compressed-tensors fp8")
    with moe_transformers.loading():
        model = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    layers = [module.layer for module in model.modules() if isinstance(module, MoeCoreExperts)]
    assert {layer.selection.activation_key for layer in layers if layer is not None} == {mc.kFp8DynamicTokenSym}
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), tokens())
    error = (logits(model, tokens()) - expected).norm() / expected.norm()
    assert 10 * BOUND < error < BOUND_FP8


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_of_any_format_takes_the_16_bit_checkpoint(tmp_path: Path, name: str) -> None:
    """Quantized by the layer's keys: also those with static scales of activations, which stay."""
    model_type = "gpt_oss" if name == "mxfp4" else "qwen3_moe"
    folder, plain = checkpoint(tmp_path, model_type, name)
    layer = mc.load_layer(folder, layer=0, device="cpu")
    before = {part: tensor.clone() for part, tensor in layer.weights.tensors()}
    weights = dict(layer.weights.tensors())
    layer.reload(plain)
    for part, tensor in weights.items():
        if part.startswith(("a1_", "a2_")):
            assert torch.equal(tensor, before[part]), part
    x = torch.randn(5, layer.config.hidden_size, generator=torch.Generator().manual_seed(2)).to(layer.config.dtype)
    exact = mc.load_layer(folder, layer=0, device="cpu")
    # the values are those that the codes stand for: half a step of 4 bits is a fifteenth of a group's largest value
    assert float((layer(x) - exact(x)).norm()) < float(exact(x).norm()) / 4
