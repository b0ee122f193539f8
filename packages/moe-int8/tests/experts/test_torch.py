from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEKernel,
    QuantKey,
    fused_moe_reference,
    kInt4W4A8StaticGroup64Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
)
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.reference import torch_experts
from moe_core.testing import ConformanceTests
from moe_core.testing.data import make_inputs, make_weights
from moe_int8.experts.torch import TorchInt8Experts

CONFIG = FusedMoEConfig(8, 2, 256, 128, dtype=torch.float32)


class TestTorchInt8(ConformanceTests):
    experts = TorchInt8Experts


def kernel(weight_key: QuantKey, activation_key: QuantKey | None) -> FusedMoEKernel:
    made = TorchInt8Experts(CONFIG, weight_key=weight_key, activation_key=activation_key)
    weights = make_weights(CONFIG, weight_key, activation_key, seed=0)
    return FusedMoEKernel(made, made.convert(weights), default_prepare_finalize(CONFIG))


@pytest.mark.parametrize("activation_key", [kInt8DynamicTokenSym, kInt8DynamicTokenAsym], ids=str)
@pytest.mark.parametrize("weight_key", [kInt8StaticChannelSym, kInt4W4A8StaticGroup64Sym], ids=str)
def test_no_weight_is_dequantized(
    weight_key: QuantKey, activation_key: QuantKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a weight was dequantized")

    monkeypatch.setattr(torch_experts, "dequantize_weight", refuse)
    monkeypatch.setattr(torch_experts.TorchExperts, "product", refuse)
    inputs = make_inputs(CONFIG, 9, seed=1)
    routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    found = kernel(weight_key, activation_key).apply(inputs.x, **routed)
    weights = make_weights(CONFIG, weight_key, activation_key, seed=0)
    expected = fused_moe_reference(inputs.x, weights, CONFIG, **routed)
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-3


def test_sums_of_codes_are_kept_where_zero_points_need_them() -> None:
    with_zero_points = kernel(kInt4W4A8StaticGroup64Sym, kInt8DynamicTokenAsym).weights
    assert {name: tuple(t.shape) for name, t in with_zero_points.extra.items()} == {
        "w13_code_sums": (8, 256, 4),
        "w2_code_sums": (8, 256, 2),
    }
    sums = with_zero_points.w13.view(8, 256, 4, 64).double().sum(dim=3)
    assert torch.equal(with_zero_points.extra["w13_code_sums"].double(), sums)
    assert not kernel(kInt8StaticChannelSym, kInt8DynamicTokenSym).weights.extra
