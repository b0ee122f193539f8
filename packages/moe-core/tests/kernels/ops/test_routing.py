"""The routing kernel has the ids and the weights of its torch twin, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from moe_core.errors import ConfigError, UnsupportedDeviceError
from moe_core.kernels.ops import _backend
from moe_core.kernels.ops.routing import fused_route
from moe_core.spec.routing import RoutingConfig, RoutingMethodType, route

R = RoutingMethodType
V3 = {"num_expert_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}

# name: (config, experts, top_k)
CASES = {
    "Default": (RoutingConfig.from_method(R.Default), 60, 4),
    "Renormalize": (RoutingConfig.from_method(R.Renormalize), 128, 8),
    "RenormalizeNaive": (RoutingConfig.from_method(R.RenormalizeNaive, routed_scaling_factor=0.3), 8, 2),
    "Llama4": (RoutingConfig.from_method(R.Llama4), 16, 1),
    "TopK": (RoutingConfig.from_method(R.TopK), 33, 5),
    "SigmoidRenorm": (RoutingConfig.from_method(R.SigmoidRenorm), 100, 32),
    "MiniMax2": (RoutingConfig.from_method(R.MiniMax2), 256, 8),
    "Sigmoid": (RoutingConfig.from_method(R.Sigmoid), 7, 7),
    "DeepseekV4": (RoutingConfig.from_method(R.DeepseekV4, routed_scaling_factor=1.5), 384, 6),
    "DeepSeekV3": (RoutingConfig.from_method(R.DeepSeekV3, **V3), 256, 8),
    "DeepSeek-V2": (RoutingConfig(renormalize=False, num_expert_group=8, topk_group=3), 160, 6),
    "groups of one": (RoutingConfig.from_method(R.DeepSeekV3, num_expert_group=12, topk_group=7), 12, 5),
    "three groups of five": (RoutingConfig.from_method(R.DeepSeekV3, num_expert_group=3, topk_group=2), 15, 10),
    "softmax and bias": (RoutingConfig(has_correction_bias=True), 64, 6),
    "sqrtsoftplus without bias": (RoutingConfig("sqrtsoftplus"), 12, 3),
    "one expert": (RoutingConfig(), 1, 1),
    "1024 experts": (RoutingConfig.from_method(R.MiniMax2), 1024, 4),
}


def logits_of(tokens, experts, dtype):
    """Rows of every kind: random, with many ties, all equal, with NaN, with infinities."""
    x = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)) * 3
    x[1::7] = x[1::7].round()
    x[2::7] = 0.0
    x[3::7, ::2] = math.nan
    x[4::7] = math.nan
    x[5::7, ::3] = -math.inf
    x[6::7, 0] = math.inf
    return x.to(dtype)


def check(logits, top_k, config, bias):
    want_weights, want_ids = route(logits, top_k=top_k, config=config, correction_bias=bias)
    weights, ids = fused_route(logits, top_k=top_k, config=config, correction_bias=bias, backend="triton")
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32
    assert torch.equal(ids, want_ids)
    # an infinite logit makes unbounded scores infinite, and their quotient NaN, in both
    assert torch.equal(weights.isnan(), want_weights.isnan())
    assert torch.equal(weights.nan_to_num(), want_weights.nan_to_num())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_twin(name, dtype, device):
    config, experts, top_k = CASES[name]
    logits = logits_of(8, experts, dtype).to(device)
    bias = None
    if config.has_correction_bias:
        # rounded: choices tie as well
        bias = torch.randn(experts, generator=torch.Generator().manual_seed(1)).mul(4).round().div(4).to(device)
    check(logits, top_k, config, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [4096, 5000])
def test_twin_on_many_tokens(name, tokens, device):
    config, experts, top_k = CASES[name]
    bias = torch.randn(experts, device=device) if config.has_correction_bias else None
    check(logits_of(tokens, experts, torch.float32).to(device), top_k, config, bias)
    check(torch.randn(tokens, experts, device=device).bfloat16(), top_k, config, bias)


def test_several_rows(device, monkeypatch):
    from moe_core.kernels.ops import routing

    monkeypatch.setattr(routing, "ONE_ROW_TOKENS", 0)
    config, experts, top_k = CASES["DeepSeekV3"]
    check(logits_of(9, experts, torch.float32).to(device), top_k, config, torch.randn(experts, device=device))
    check(logits_of(6, 60, torch.bfloat16).to(device), 4, RoutingConfig(), None)


def test_no_tokens_and_strides(device):
    config = RoutingConfig.from_method(R.DeepSeekV3, num_expert_group=4, topk_group=2)
    bias = torch.randn(32, device=device).bfloat16()[::2]
    weights, ids = fused_route(
        torch.empty(0, 16, device=device), top_k=3, config=config, correction_bias=bias, backend="triton"
    )
    assert weights.shape == ids.shape == (0, 3)
    logits = torch.randn(16, 2, 5, device=device)[:, 1].T
    assert logits.stride() == (1, 10)
    check(logits, 3, config, bias)


def test_auto_falls_back_to_torch_beyond_the_tile(device):
    logits = torch.randn(3, 2000, device=device)
    weights, ids = fused_route(logits, top_k=40, config=RoutingConfig())
    want_weights, want_ids = route(logits, top_k=40, config=RoutingConfig())
    assert torch.equal(ids, want_ids)
    assert torch.equal(weights, want_weights)
    with pytest.raises(ConfigError, match="2000 experts"):
        fused_route(logits, top_k=4, config=RoutingConfig(), backend="triton")
    with pytest.raises(ConfigError, match="backend 'cuda'"):
        fused_route(logits, top_k=4, config=RoutingConfig(), backend="cuda")


def test_triton_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(_backend, "interpreting", lambda: False)
    with pytest.raises(UnsupportedDeviceError, match="needs a GPU"):
        fused_route(torch.randn(2, 8), top_k=2, config=RoutingConfig(), backend="triton")


def test_custom(device):
    def last(router_logits, *, top_k, renormalize):
        tokens, experts = router_logits.shape
        ids = torch.arange(experts - top_k, experts, device=router_logits.device).expand(tokens, top_k)
        return router_logits.gather(1, ids), ids

    logits = torch.randn(3, 8, device=device)
    weights, ids = fused_route(logits, top_k=2, config=RoutingConfig(custom=last))
    assert torch.equal(weights, logits[:, 6:])
    assert ids.tolist() == [[6, 7]] * 3
