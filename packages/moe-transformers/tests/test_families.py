"""Every MoE family of transformers: its experts, quantized at load, compute what its own modules do."""

from __future__ import annotations

from pathlib import Path

import moe_transformers
import pytest
import torch
from moe_core.checkpoint.config.families import family_of
from moe_core_transformers import families, omni_model, tiny_model
from moe_transformers import MoeCoreExperts, RefusedError
from moe_transformers.blocks import blocks
from transformers import PreTrainedModel

KNOWN = sorted(name for name in families() if family_of(name) is not None)
#: blocks call their experts with hidden states alone, or experts one by one
OTHERWISE = {"llama4_text", "longcat_flash", "step3p5"} & set(KNOWN)
#: e4m3 has 4 significant bits: each weight is off by at most 2^-4 of itself, in the mean square by a third of that;
#: the output is a product of what three matrices give
BOUND = 3 * 2.0**-4 / 3


def compare(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    with moe_transformers.loading(quantize="fp8_per_channel_w8a16"):
        loaded = type(model).from_pretrained(folder, dtype=torch.float32)
    found = list(blocks(model))
    assert found
    generator = torch.Generator().manual_seed(0)
    for block in found:
        experts = loaded.get_submodule(block.name)
        assert isinstance(experts, MoeCoreExperts)
        assert experts.layer is not None
        config = experts.layer.config
        x = torch.randn(9, config.hidden_size, generator=generator)
        ids = torch.rand(9, config.num_experts, generator=generator).argsort(dim=1)[:, : config.top_k]
        weights = torch.rand(ids.shape, generator=generator)
        with torch.no_grad():
            expected = block.module(x, ids, weights)
            error = (experts(x, ids, weights) - expected).norm() / expected.norm()
        assert error < BOUND


@pytest.mark.parametrize("model_type", sorted(set(KNOWN) - OTHERWISE))
def test_experts_compute_as_their_modules(tmp_path: Path, model_type: str) -> None:
    compare(tiny_model(model_type), tmp_path)


def test_two_stacks_of_layers(tmp_path: Path) -> None:
    compare(omni_model(), tmp_path)


@pytest.mark.parametrize("model_type", sorted(OTHERWISE))
def test_blocks_that_call_experts_otherwise_are_refused(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    expected = "topk_ids"
    with moe_transformers.loading(quantize="fp8_per_channel"), pytest.raises(RefusedError, match=expected):
        type(model).from_pretrained(tmp_path)
    with moe_transformers.loading():
        assert not [m for m in type(model).from_pretrained(tmp_path).modules() if isinstance(m, MoeCoreExperts)]
