"""Scales of 8-bit activations: their granularity, and static ones, which every class takes from one place."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    QuantKey,
    TensorError,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Static,
)
from moe_core.testing.data import make_weights
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts

CONFIG = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=128, intermediate_size=128)
CLASSES = pytest.mark.parametrize(
    ("module", "name", "key"),
    [
        ("moe_fp8.experts.triton_scaled_mm", "TritonFp8Experts", kFp8StaticTensorSym),
        ("moe_mxfp4.experts.marlin_fp8", "MarlinMxfp4Fp8Experts", kMxfp4Static),
        ("moe_mxfp4.experts.triton", "TritonMxfp4Experts", kMxfp4Static),
    ],
)


@CLASSES
def test_they_are_float32_and_contiguous(module: str, name: str, key: QuantKey) -> None:
    experts = getattr(importlib.import_module(module), name)
    weights = make_weights(CONFIG, key, kFp8StaticTensorSym, seed=0)
    scale = torch.tensor([[0.25, 9.0], [0.5, 9.0]], dtype=torch.bfloat16)[:, 0]
    converted = experts(CONFIG, weight_key=key, activation_key=kFp8StaticTensorSym).convert(
        replace(weights, w13_input_scale=scale)
    )
    found = converted.quant_config.a1_scale
    assert found.dtype is torch.float32
    assert found.is_contiguous()
    assert found.tolist() == [0.25, 0.5]


@CLASSES
@pytest.mark.parametrize("missing", ["w13_input_scale", "w2_input_scale"])
def test_a_missing_one_is_named(module: str, name: str, key: QuantKey, missing: str) -> None:
    experts = getattr(importlib.import_module(module), name)
    weights = replace(make_weights(CONFIG, key, kFp8StaticTensorSym, seed=0), **{missing: None})
    with pytest.raises(TensorError, match=f"{missing} .*kFp8StaticTensorSym"):
        experts(CONFIG, weight_key=key, activation_key=kFp8StaticTensorSym).convert(weights)


@pytest.mark.parametrize(
    ("key", "expected"),
    [(kFp8DynamicTokenSym, "token"), (kFp8DynamicTensorSym, "tensor"), (kFp8StaticTensorSym, "static")],
)
def test_granularity_follows_from_the_key(key: QuantKey, expected: str) -> None:
    assert TritonFp8Experts(CONFIG, weight_key=kFp8StaticTensorSym, activation_key=key).granularity == expected


@pytest.mark.parametrize("key", [None, kFp8Dynamic128Sym])
def test_other_activations_are_refused(key: QuantKey | None) -> None:
    experts = TritonFp8Experts(CONFIG, weight_key=kFp8StaticTensorSym, activation_key=key)
    with pytest.raises(TensorError, match=r"key .*(None|kFp8Dynamic128Sym)"):
        _ = experts.granularity
