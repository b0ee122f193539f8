"""Models over several ranks give the logits of the model on one."""

from __future__ import annotations

from pathlib import Path

import moe_transformers
import pytest
import torch
from moe_core import ConfigError
from moe_core.testing.ranks import run_ranks
from moe_transformers.ranks import groups_of, leave_to_moe_core
from moe_transformers_checkpoints import E, N, checkpoint, logits, tokens
from moe_transformers_ranks import models
from torch import nn
from transformers import AutoModelForCausalLM

#: heads and sizes that two ranks share evenly
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_two_ranks(tmp_path: Path) -> None:
    quantized, _ = checkpoint(tmp_path, "qwen3_moe", "compressed-tensors fp8", **SIZES)
    with moe_transformers.loading(activation_key=None):
        alone = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32)
    expected = logits(alone, tokens(2, 7))
    whole = sum(p.numel() for p in alone.parameters())
    for found in run_ranks(models, quantized, ranks=2, seconds=120):
        for name, (result, (layers, experts, columns, held)) in found.items():
            # sums in another order, in some forty steps: each of at most 96 terms in float32
            assert (result - expected).norm() < 40 * 96**0.5 * 2.0**-24 * expected.norm(), name
            assert layers == 2
            assert (experts, columns) == ((E, N // 2) if name.startswith("columns") else (E // 2, N))
            assert held == whole if name == "experts alone" else held < 0.7 * whole


@pytest.mark.parametrize("name", ["ep_size", "fsdp_size", "pp_size", "dp_replicate_size"])
def test_other_ways_of_sharing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"distributed_config has {name}, which experts of moe-core do not follow"):
        groups_of({"tp_size": 2, name: 2}, None)
    assert groups_of({"tp_size": 1, name: 1}, None) is None


def test_rules_of_plans_are_for_all_layers() -> None:
    model = nn.Module()
    rules = {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.down_proj": "rowwise"}
    model._tp_plan = {"lm_head": "colwise", **rules}  # type: ignore[assignment]
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts has experts in 16 bits, which transformers runs"):
        leave_to_moe_core(model, names[:1], names)
    leave_to_moe_core(model, names, names)
    assert model._tp_plan == {"lm_head": "colwise"}
