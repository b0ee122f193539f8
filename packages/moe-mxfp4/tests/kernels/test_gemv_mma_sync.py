"""Few tokens of e2m1 weights by `mma.sync`: warps that share rows, sizes that are no whole steps, turns and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, MoEActivation, kMxfp4Static
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan
from moe_core.kernels.launch.launch import observe
from moe_kit.few_tokens import FewTokens
from moe_kit.planned import with_gemv
from moe_mxfp4.experts.marlin import MarlinMxfp4Experts

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=468, intermediate_size=348, has_bias=True)
pytestmark = pytest.mark.gpu


def checked(device, block_n=16, block_w=128, pdl=True, call=None, fuse_finalize=False, along_m=False, **changes):
    """The output of a layer, by two launches of the kernel."""
    config = GemvConfig(block_n, block_w, 4, mma_sync=True, along_m=along_m)
    experts = with_gemv(MarlinMxfp4Experts, GemvPlan(config, config, pdl, fuse_finalize))
    launches = []
    with observe(launches.append):
        out = FewTokens(experts, replace(CONFIG, **changes), kMxfp4Static).check(device, **(call or {}))
    names = [one.name for one in launches]
    assert names.count("gemv_mma_kernel") == 2
    assert names.count("reduce_kernel") == (not fuse_finalize)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("block_w", [32, 128, 1024])
def test_every_configuration(block_n, block_w, dtype, device):
    checked(device, block_n, block_w, dtype=dtype)


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("columns", [64, 128, 256, 640, 1024])
def test_rows_of_few_steps_and_of_whole_ones(columns, block_n, device):
    checked(device, block_n, hidden_size=columns, intermediate_size=columns)


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL])
@pytest.mark.parametrize("bias", [False, True])
def test_activations(activation, bias, device):
    checked(device, activation=activation, has_bias=bias)


@pytest.mark.parametrize("pdl", [False, True])
def test_gpt_oss(pdl, device):
    sizes = {"hidden_size": 2880, "intermediate_size": 2880, "activation": MoEActivation.SWIGLUOAI}
    checked(device, block_w=384, pdl=pdl, num_experts=8, num_local_experts=8, **sizes)


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("on_input", [False, True])
def test_a_few_tokens(tokens, on_input, device):
    top_k = 1 if on_input else 4
    changes = {"top_k": top_k, "apply_router_weight_on_input": on_input}
    outs = [checked(device, call={"tokens": tokens}, along_m=along_m, **changes) for along_m in (False, True)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("routing", ["uniform", "invalid", "nothing"])
@pytest.mark.parametrize("local", [12, 32])
def test_pairs_without_an_expert_add_nothing(local, routing, device):
    out = checked(device, call={"tokens": 3, "routing": routing}, num_local_experts=local)
    assert routing != "nothing" or not out.any()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number, device):
    out = checked(device, call={"change": lambda x: x[0, 40].fill_(number), "finite": False})
    assert not out.isfinite().any()


@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_the_only_pair_of_a_token_needs_no_finalize(block_n, device):
    call = {"tokens": 2, "ids": torch.tensor([[2], [-1]])}
    out = checked(device, block_n, call=call, top_k=1, fuse_finalize=True)
    assert out[0].any()
    assert not out[1].any()
