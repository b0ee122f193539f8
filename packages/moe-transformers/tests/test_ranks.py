"""Models over several ranks give the logits of the model on one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import moe_transformers
import pytest
import torch
from moe_core import ConfigError, FusedMoEParallelConfig, ParallelGroups
from moe_kit.ranks import run_ranks
from moe_transformers.ranks import groups_of, leave_to_moe_core
from moe_transformers_checkpoints import E, K, N, checkpoint, logits, tokens
from moe_transformers_ranks import models
from torch import nn
from transformers import AutoModelForCausalLM

#: heads that two ranks share evenly
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("device", "hidden", "inter"),
    [
        ("cpu", K, N),
        pytest.param(
            "cuda",
            256,  # sizes that kernels take
            256,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a GPU for each of two ranks"),
            ],
        ),
    ],
)
def test_two_ranks(tmp_path: Path, device: str, hidden: int, inter: int) -> None:
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inter, "intermediate_size": inter}
    quantized, _ = checkpoint(tmp_path, "qwen3_moe", "compressed-tensors fp8", **HEADS, **sizes)
    with moe_transformers.loading(activation_key=None):
        placed = {} if device == "cpu" else {"device_map": device}
        alone = AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32, **placed)
    expected = logits(alone, tokens(2, 7).to(device)).cpu()
    whole = sum(p.numel() for p in alone.parameters())
    backend = "gloo" if device == "cpu" else "nccl"
    for found in run_ranks(models, quantized, device, ranks=2, backend=backend, seconds=240):
        for name, (result, (layers, experts, columns, held)) in found.items():
            # sums in another order, in some forty steps: each of so many terms in float32
            bound = 40 * max(hidden, inter) ** 0.5 * 2.0**-24
            assert (result - expected).norm() < bound * expected.norm(), name
            assert layers == 2
            assert (experts, columns) == ((E, inter // 2) if name.startswith("columns") else (E // 2, inter))
            assert held == whole if name == "experts alone" else held < 0.7 * whole


@pytest.mark.parametrize("name", ["ep_size", "fsdp_size", "pp_size", "dp_replicate_size"])
def test_other_ways_of_sharing_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"distributed_config .*{name}"):
        groups_of({"tp_size": 2, name: 2}, None)
    assert groups_of({"tp_size": 1, name: 1}, None) is None


def test_groups_that_share_results_out_are_refused() -> None:
    parallel = FusedMoEParallelConfig(tp_size=2, all2all_backend="reduce_scatter")
    with pytest.raises(ConfigError, match="all2all_backend 'reduce_scatter'"):
        groups_of(None, cast(ParallelGroups, SimpleNamespace(parallel=parallel)))


def test_rules_of_plans_are_for_all_layers() -> None:
    model = nn.Module()
    rules = {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.down_proj": "rowwise"}
    model._tp_plan = {"lm_head": "colwise", **rules}  # type: ignore[assignment]
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]
    with pytest.raises(ConfigError, match="layers.1.mlp.experts"):
        leave_to_moe_core(model, names[:1], names)
    leave_to_moe_core(model, names, names)
    assert model._tp_plan == {"lm_head": "colwise"}
