"""Whole tiny models, each linear layer and expert in one tool's format, against the same model with the codes' values.

In float32, with activations that are not quantised, both compute the same numbers, but for the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import moe_core as mc
import moe_transformers
import pytest
import torch
from moe_transformers import MoeCoreExperts
from moe_transformers_checkpoints import FORMATS, N, checkpoint, logits, tokens
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
