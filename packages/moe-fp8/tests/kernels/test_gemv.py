"""One token of e4m3 weights: without tensor cores where a row has one scale."""

from __future__ import annotations

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    Workspace,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Static,
)
from moe_core.device import DeviceInfo
from moe_core.testing.data import make_inputs, make_weights
from moe_core.testing.tolerance import expected_output
from moe_fp8.experts.marlin import MarlinFp8Experts

KEYS = [kFp8StaticTensorSym, kFp8StaticChannelSym, kFp8Static128BlockSym, kMxfp8Static]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_kind_of_scales(key, dtype, device, monkeypatch):
    from moe_core.gemm.marlin import gemv

    launched = []
    whole = gemv.GemvLayer.__call__
    monkeypatch.setattr(
        gemv.GemvLayer, "__call__", lambda *given, **named: launched.append(1) or whole(*given, **named)
    )
    config = FusedMoEConfig(num_experts=5, top_k=3, hidden_size=224, intermediate_size=160, dtype=dtype, has_bias=True)
    target = DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm90")
    experts = MarlinFp8Experts(config, weight_key=key, activation_key=None, device=target)
    weights, inputs = make_weights(config, key, None, seed=3).to(device), make_inputs(config, 1, seed=4)
    arguments = {"topk_weights": inputs.topk_weights.to(device), "topk_ids": inputs.topk_ids.to(device)}
    x = inputs.x.to(device)
    out = torch.full_like(x, float("nan"))
    workspace = Workspace(device).take(experts.workspaces(1))
    experts.apply(out, x, experts.convert(weights), workspace=workspace, **arguments)
    expected = expected_output(x, weights, config, **arguments)
    expected.compare(out, "result")
    assert bool(launched) == (key in KEYS[:2])
