"""Activations: the formulas of SGLang's kernel, which picks them by a name and four numbers."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_core import ConfigError, FusedMoEConfig, apply_moe_activation
from moe_sglang.layer import layer_config
from moe_sglang_layers import HIDDEN, config, info_of, runner, weights_of
from torch import Tensor
from torch.nn.functional import gelu, silu

BLOCK = ("use_fp8_w8a8", "block")


def described(sglang: types.SimpleNamespace, **settings: Any) -> FusedMoEConfig:
    gated = settings.get("is_gated", True)
    layer = config() if gated else config(activation="silu_no_mul")
    info = info_of(sglang, BLOCK, weights_of(BLOCK, False, layer))
    return layer_config(runner(sglang, **settings), info, top_k=2, hidden_size=HIDDEN, dtype=torch.bfloat16)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.chunk(2, -1)
    return gate, up


def swiglu_no_interleaved(x: Tensor) -> Tensor:
    gate, up = halves(x)
    gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)
    return gate * torch.sigmoid(gate * 1.7) * (up + 1)


def swiglu_clamp_mul(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(gate).clamp(max=1.5) * up.clamp(-1.5, 1.5)


def clamped_inputs(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)


def situ(beta: float, linear: float | None) -> Callable[[Tensor], Tensor]:
    def formula(x: Tensor) -> Tensor:
        gate, up = halves(x)
        gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
        return gate * (up if linear is None else linear * torch.tanh(up / linear))

    return formula


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({}, lambda x: silu(halves(x)[0]) * halves(x)[1]),
        ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 1.5, "gate_up_interleaved": False}, swiglu_no_interleaved),
        ({"gemm1_clamp_limit": 1.5}, swiglu_clamp_mul),
        ({"swiglu_limit": 1.5}, clamped_inputs),
        ({"activation": "situ"}, situ(4.0, None)),
        ({"activation": "situ", "gemm1_alpha": 2.0, "gemm1_clamp_limit": 1.5}, situ(2.0, 1.5)),
        ({"activation": "gelu"}, lambda x: gelu(halves(x)[0]) * halves(x)[1]),
        ({"activation": "gelu_tanh"}, lambda x: gelu(halves(x)[0], approximate="tanh") * halves(x)[1]),
        ({"activation": "silu", "is_gated": False}, silu),
        ({"activation": "gelu", "is_gated": False}, gelu),
        ({"activation": "relu2", "is_gated": False}, lambda x: torch.relu(x).square()),
    ],
)
def test_activations(
    sglang: types.SimpleNamespace, settings: dict[str, Any], formula: Callable[[Tensor], Tensor]
) -> None:
    layer = described(sglang, **settings)
    x = 3 * torch.randn(64, 2 * 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = apply_moe_activation(layer.activation, x, layer.activation_params)
    assert torch.allclose(found, formula(x), rtol=1e-12, atol=1e-12)
    assert layer.is_gated is settings.get("is_gated", True)
    assert layer.intermediate_size == 128


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, "gate_up_interleaved"),
        ({"gemm1_alpha": 1.7, "gate_up_interleaved": False}, "gemm1_clamp_limit"),
        ({"activation": "gelu", "gemm1_clamp_limit": 7.0}, "gelu"),
        ({"activation": "gelu_tanh", "is_gated": False}, "gelu_tanh"),
        ({"activation": "silu_rounded"}, "silu_rounded"),
    ],
)
def test_what_sglang_does_not_define_is_refused(
    sglang: types.SimpleNamespace, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        described(sglang, **settings)


def test_an_unlimited_situ_stays_unlimited(sglang: types.SimpleNamespace) -> None:
    assert described(sglang, activation="situ").params.limit in (None, math.inf)
