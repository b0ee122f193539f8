"""gpt-oss as GPTQModel kept it until 2026: a linear module for gate and up of each expert, whose rows lie in turns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import FusedMoEParallelConfig, QuantKey, kInt4Static, kInt4StaticAsym, load_layer
from moe_core.checkpoint import Checkpoint, LayerSource, read_layer
from moe_core.parallel.shard import shard_layer
from moe_core.testing.checkpoints import CONFIG, PREFIX, refused, source, write
from moe_wna16_words import SIZES, Codes, K, N, Tensors, awq, check, gptq, gptq_2
from torch import Tensor

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 3,
    "num_experts": None,
    "hidden_size": K,
    "intermediate_size": N,
    "moe_intermediate_size": None,
    "norm_topk_prob": None,
    "swiglu_limit": 7.0,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


def config(experts: Codes, **changes: Any) -> dict[str, Any]:
    return {**GPTQ, "bits": experts.bits, "sym": experts.symmetric, **changes}


def loaded(folder: Path, tensors: Tensors, experts: Codes, **changes: Any) -> LayerSource:
    return source(folder, tensors, config(experts, **changes), **GPT_OSS)


def key(experts: Codes, permuted: bool = False) -> QuantKey:
    found = kInt4Static if experts.symmetric else kInt4StaticAsym
    return replace(found.with_group(1, 32).with_scale_dtype(experts.dtype), permuted=permuted)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_rows_in_turns(tmp_path: Path, symmetric: bool, version: str) -> None:
    experts = Codes(symmetric=symmetric, low=1, dtype=torch.float16)
    tensors = experts.in_turns(gptq if version == "gptq" else gptq_2)
    found = loaded(tmp_path, tensors, experts, checkpoint_format=version)
    assert found.config.has_bias
    check(found, experts, key(experts))
    weights = found.weights()
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    for expert in range(3):
        rows = torch.arange(2 * N).float() + expert
        assert torch.equal(weights.w13_bias[expert], torch.cat((rows[0::2], rows[1::2])))
        assert torch.equal(weights.w2_bias[expert], torch.arange(K).float() + expert)


def test_activation_order(tmp_path: Path) -> None:
    experts = Codes(order=True)
    check(loaded(tmp_path, experts.in_turns(gptq), experts, desc_act=True), experts, key(experts, permuted=True))


def test_awq_of_the_same_modules(tmp_path: Path) -> None:
    experts = Codes(symmetric=False)
    found = source(tmp_path, experts.in_turns(awq), AWQ, **GPT_OSS)
    check(found, experts, kInt4StaticAsym.with_group(1, 32))


def test_the_layer_runs(tmp_path: Path) -> None:
    """With gpt-oss's router and activation function, as of the same weights one by one."""
    experts = Codes()
    router = {f"{PREFIX.removesuffix('experts')}router.{name}": tensor for name, tensor in router_tensors().items()}
    one_by_one = {**experts.tensors(gptq), **router}
    for name, tensor in experts.in_turns(gptq).items():
        if name.endswith(".bias") and "gate_up" in name:
            expert = name.split(".")[-2]
            one_by_one[f"{PREFIX}.{expert}.gate_proj.bias"] = tensor[0::2].contiguous()
            one_by_one[f"{PREFIX}.{expert}.up_proj.bias"] = tensor[1::2].contiguous()
        elif name.endswith(".bias"):
            one_by_one[f"{PREFIX}.{name.split('.')[-2]}.down_proj.bias"] = tensor
    outputs = []
    for folder, tensors in (("a", one_by_one), ("b", {**experts.in_turns(gptq), **router})):
        path = write(tmp_path / folder, tensors, {**CONFIG, "quantization_config": GPTQ}, **GPT_OSS)
        layer = load_layer(path, backend="torch", device="cpu")
        outputs.append(layer(torch.linspace(-1, 1, 4 * K).reshape(4, K).bfloat16()))
    assert torch.equal(outputs[0], outputs[1])
    assert bool(outputs[0].isfinite().all())


def router_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {"weight": torch.randn(3, K, generator=generator).bfloat16(), "bias": torch.zeros(3).bfloat16()}


@pytest.mark.parametrize(("writer", "inter"), [(gptq, 96), (awq, 96), (awq, 52), (awq, 100)])
def test_ranks_read_their_rows(tmp_path: Path, writer: Any, inter: int) -> None:
    """A word along rows holds four of gate and four of up: 13 words hold 52 of either."""
    experts = Codes(symmetric=False, low=1, inter=inter, group=4)
    quantization = config(experts, group_size=4) if writer is gptq else {**AWQ, "group_size": 4}
    changes = {**GPT_OSS, "intermediate_size": inter, "quantization_config": quantization}
    checkpoint = Checkpoint.open(write(tmp_path, experts.in_turns(writer), CONFIG, **changes))
    whole = read_layer(checkpoint)
    assert whole.layout.column_unit is not None
    weights = whole.weights()
    for tp_size in (2, 3) if inter == 96 else (2,):
        for rank in range(tp_size):
            parallel = FusedMoEParallelConfig(tp_size=tp_size, tp_rank=rank)
            part = read_layer(checkpoint, parallel=parallel)
            wanted = dict(shard_layer(whole.config, weights, parallel, plan=part.plan).weights.tensors())
            found = dict(part.weights().tensors())
            assert found.keys() == wanted.keys()
            for name, values in wanted.items():
                assert torch.equal(found[name], values), (tp_size, rank, name)


def test_other_models_with_these_modules(tmp_path: Path) -> None:
    """Nobody says how their rows lie."""
    experts = Codes()
    message = "has gate_up.<expert>, as gpt-oss, but its model_type is 'qwen3_moe'"
    refused(tmp_path, experts.in_turns(gptq), config(experts), PREFIX, message, **SIZES)


def test_one_expert_is_missing(tmp_path: Path) -> None:
    experts = Codes()
    tensors = experts.in_turns(gptq)
    del tensors[f"{PREFIX}.gate_up.1.scales"]
    refused(tmp_path, tensors, config(experts), f"{PREFIX}.gate_up.1.scales is missing", **GPT_OSS)


def test_a_lost_weight_is_told_by_its_row_in_the_file(tmp_path: Path) -> None:
    experts = Codes()
    tensors = experts.in_turns(gptq)
    tensors[f"{PREFIX}.gate_up.2.scales"][1, 7] = 0  # up's row 3
    refused(tmp_path, tensors, config(experts), f"{PREFIX}.gate_up.2.scales is 0 where", "first at [7, 32]", **GPT_OSS)
