"""Few tokens of e4m3 weights and activations, whose pairs are not sorted: every kind of scales, sizes and routings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    MoEActivation,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan
from moe_core.kernels.launch.launch import observe
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.testing.data import make_inputs, make_weights
from moe_fp8.experts.triton import TritonFp8BlockExperts
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts
from moe_kit.few_tokens import FewTokens
from moe_kit.planned import with_gemv

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=640, intermediate_size=384, has_bias=True)
BLOCK = TritonFp8BlockExperts, kFp8Static128BlockSym, kFp8Dynamic128Sym
NARROW = TritonFp8BlockExperts, kFp8Static128BlockSym.with_group(64, 64), kFp8Dynamic64Sym
CHANNEL = TritonFp8Experts, kFp8StaticChannelSym, kFp8DynamicTokenSym
TENSOR = TritonFp8Experts, kFp8StaticTensorSym, kFp8DynamicTokenSym
STATIC = TritonFp8Experts, kFp8StaticChannelSym, kFp8StaticTensorSym
KINDS = {"block": BLOCK, "narrow": NARROW, "channel": CHANNEL, "tensor": TENSOR, "static": STATIC}
kinds = pytest.mark.parametrize("kind", KINDS)
pytestmark = pytest.mark.gpu


def checked(device, kind="block", plan=None, call=None, **changes):
    """The output of a layer, by two launches of the kernel."""
    experts, *keys = KINDS[kind]
    launches = []
    with observe(launches.append):
        layer = FewTokens(experts if plan is None else with_gemv(experts, plan), replace(CONFIG, **changes), *keys)
        out = layer.check(device, **(call or {}))
    names = [one.name for one in launches]
    assert names.count("scaled_gemv_kernel") == 2
    if plan is not None:
        assert names.count("reduce_kernel") == (not plan.fuse_finalize)
    return out


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_kind_of_scales(kind, dtype, device):
    checked(device, kind, dtype=dtype)


@kinds
@pytest.mark.parametrize("columns", [16, 128, 400, 1040])
def test_sizes_that_are_no_whole_steps(kind, columns, device):
    checked(device, kind, hidden_size=columns + 64, intermediate_size=columns)


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("block_w", [32, 64, 128])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_configuration(block_n, block_w, stages, device):
    config = GemvConfig(block_n, block_w, 4, num_stages=stages)
    checked(device, "block", GemvPlan(config, config, pdl=stages > 1))
    checked(device, "channel", GemvPlan(config, config, pdl=stages > 1))


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "block_w", "stages"), [(8, 32, 2), (16, 32, 1), (4, 32, 4), (8, 64, 2), (4, 128, 3)])
@kinds
def test_every_configuration_that_adds_up_pairs(kind, rows, block_w, stages, top_k, device):
    warps = max(top_k, 4)
    config = GemvConfig(rows * warps, block_w, warps, num_stages=stages)
    plan = GemvPlan(GemvConfig(16, block_w, 4, num_stages=stages), config, pdl=stages > 1, fuse_finalize=True)
    for call in ({}, {"tokens": 3, "routing": "invalid"}):
        checked(device, kind, plan, call, top_k=top_k, num_local_experts=12)


@kinds
@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL])
def test_activations(kind, activation, device):
    checked(device, kind, activation=activation, has_bias=False)


@kinds
@pytest.mark.parametrize("tokens", [2, 4])
def test_a_few_tokens(kind, tokens, device):
    checked(device, kind, call={"tokens": tokens}, num_experts=128, num_local_experts=128)


@kinds
@pytest.mark.parametrize("fuse_finalize", [False, True])
def test_the_order_of_programs_changes_no_bit(kind, fuse_finalize, device):
    outs = []
    for along_m in (False, True):
        config = GemvConfig(32, 32, 4, num_stages=2, along_m=along_m)
        plan = GemvPlan(config, config, pdl=True, fuse_finalize=fuse_finalize)
        outs.append(checked(device, kind, plan, {"tokens": 7, "routing": "invalid"}, num_local_experts=12))
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", ["block", "channel"])
def test_weights_on_the_input(kind, device):
    checked(device, kind, top_k=1, apply_router_weight_on_input=True)


@kinds
@pytest.mark.parametrize("routing", ["uniform", "invalid", "nothing"])
def test_pairs_without_an_expert_add_nothing(kind, routing, device):
    out = checked(device, kind, call={"tokens": 2, "routing": routing}, num_local_experts=12)
    assert routing != "nothing" or not out.any()


@kinds
def test_a_nan_stays_one(kind, device):
    call = {"change": lambda x: x[0, 40].fill_(float("nan")), "finite": False}
    assert bool(checked(device, kind, call=call).isnan().all())


def test_a_nan_among_the_scales_of_blocks_stays_one(device):
    experts, *keys = BLOCK
    made = FewTokens(experts, CONFIG, *keys).made(device)
    weights, inputs = make_weights(CONFIG, *keys, seed=3).to(device), make_inputs(CONFIG, 1, seed=4)
    weights.w2_scale.fill_(float("nan"))
    kernel = FusedMoEKernel(made, made.convert(weights), default_prepare_finalize(CONFIG))
    routed = {"topk_weights": inputs.topk_weights.to(device), "topk_ids": inputs.topk_ids.to(device)}
    assert bool(kernel.apply(inputs.x.to(device), **routed).isnan().all())


def test_sizes_that_are_not_read_in_16_bytes_take_the_tiles(device):
    experts, *keys = CHANNEL
    FewTokens(experts, replace(CONFIG, intermediate_size=92), *keys).check(device, tiles=True)
