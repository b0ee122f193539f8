"""One token without tensor cores: every kind of scales, both sizes of codes, sizes that are no whole blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, Workspace, kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym
from moe_core.device import DeviceInfo
from moe_core.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import expected_output
from moe_wna16.experts.marlin import MarlinWNA16Experts

KEYS = [
    kInt4Static,
    kInt4Static.with_group(1, 32),
    kInt4Static.with_group(1, -1),
    kInt4StaticAsym.with_group(1, 64),
    kInt4StaticAsym.with_group(1, -1),
    kInt8Static,
    kInt8Static.with_group(1, 32),
    kInt8Static.with_group(1, -1),
    kInt8StaticAsym.with_group(1, 64),
]
#: no whole steps, turns and blocks
LAYER = FusedMoEConfig(num_experts=5, top_k=3, hidden_size=200, intermediate_size=92, has_bias=True)


def made(config, key, device):
    target = DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm90")
    return MarlinWNA16Experts(config, weight_key=key, activation_key=None, device=target)


def run(experts, config, key, device, *, tokens=1, ids=None, change=lambda x: None):
    """The output of so many tokens, after a ``change`` of x, in poisoned memory, and what is expected of it."""
    weights = make_weights(config, key, None, seed=3).to(device)
    inputs = make_inputs(config, tokens, seed=4)
    ids = inputs.topk_ids if ids is None else ids
    arguments = {"topk_weights": inputs.topk_weights.to(device), "topk_ids": ids.to(device)}
    workspace = Workspace(device).take(experts.workspaces(tokens))
    for tensor in workspace.values():
        tensor.view(torch.uint8).fill_(0xFF)
    x = inputs.x.to(device)
    change(x)
    out = torch.full_like(x, float("nan"))
    experts.apply(out, x, experts.convert(weights), workspace=workspace, **arguments)
    return out, expected_output(x, weights, config, **arguments)


@pytest.fixture
def launched(monkeypatch):
    """How often the kernels without tensor cores were started."""
    from moe_core.gemm.marlin import gemv

    calls = []
    whole = gemv.GemvLayer.__call__
    monkeypatch.setattr(gemv.GemvLayer, "__call__", lambda *given, **named: calls.append(1) or whole(*given, **named))
    return calls


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_kind_of_scales(key, device, launched):
    dtype = torch.float16 if key.group_size == 32 else torch.bfloat16
    config = replace(LAYER, dtype=dtype)
    out, expected = run(made(config, key, device), config, key, device)
    expected.compare(out, "result")
    assert launched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", [kInt4StaticAsym, kInt4Static.with_group(1, 32)], ids=str)
def test_numbers_of_every_size_become_integers(key, dtype, device, launched):
    def change(x):
        # some far larger than those that share their power of two, some too small for it, and none at all
        x[0, 7::32] *= 64
        x[0, 32:48] *= 2.0**-10
        x[0, 64:128] = 0

    config = replace(LAYER, dtype=dtype)
    out, expected = run(made(config, key, device), config, key, device, change=change)
    expected.compare(out, "result")
    assert launched


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number, device, launched):
    out, _ = run(made(LAYER, kInt4Static, device), LAYER, kInt4Static, device, change=lambda x: x[0, 40].fill_(number))
    assert not out.isfinite().any()
    assert launched


@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("block_w", [32, 128, 256])
def test_blocks_of_every_size(block_n, block_w, device, launched):
    experts = made(LAYER, kInt4Static, device)
    config = GemvConfig(block_n, block_w, 4)
    experts.gemv_plan = lambda *arguments: GemvPlan(config, config)
    out, expected = run(experts, LAYER, kInt4Static, device, tokens=2)
    expected.compare(out, "result")
    assert launched


def test_a_few_tokens_that_may_share_experts(device, launched):
    config = replace(LAYER, num_experts=64, num_local_experts=64, top_k=2)
    ids = torch.tensor([[3, 60], [60, 7], [3, 7], [-1, 60]])
    out, expected = run(made(config, kInt4Static, device), config, kInt4Static, device, tokens=4, ids=ids)
    expected.compare(out, "result")
    assert launched


def test_pairs_without_an_expert_add_nothing(device, launched):
    ids = torch.tensor([[-1, 2, 7]])
    out, expected = run(made(LAYER, kInt4Static, device), LAYER, kInt4Static, device, ids=ids)
    expected.compare(out, "result")
    out, _ = run(made(LAYER, kInt4Static, device), LAYER, kInt4Static, device, ids=torch.full((1, 3), -1))
    assert not out.any()
    assert launched


def test_activations_that_are_not_read_in_pairs_take_the_tiles(device, launched):
    config = replace(LAYER, intermediate_size=91)
    out, expected = run(made(config, kInt4Static, device), config, kInt4Static, device)
    expected.compare(out, "result")
    out, expected = run(made(LAYER, kInt4Static, device), LAYER, kInt4Static, device, tokens=3)
    expected.compare(out, "result")
    assert not launched
