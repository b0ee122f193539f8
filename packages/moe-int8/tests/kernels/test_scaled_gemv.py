"""Few tokens of int8 weights and activations, whose pairs are not sorted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
)
from moe_core.kernels.launch.launch import observe
from moe_int8.experts.triton import TritonInt8Experts
from moe_kit.few_tokens import FewTokens

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=640, intermediate_size=384, has_bias=True)
KEYS = {"token": kInt8DynamicTokenSym, "static": kInt8StaticTensorSym}
keys = pytest.mark.parametrize("key", KEYS)
pytestmark = pytest.mark.gpu


def checked(device, key="token", call=None, **changes):
    """The output of a layer, by two launches of the kernel."""
    launches = []
    with observe(launches.append):
        layer = FewTokens(TritonInt8Experts, replace(CONFIG, **changes), kInt8StaticChannelSym, KEYS[key])
        out = layer.check(device, **(call or {}))
    assert [one.name for one in launches].count("scaled_gemv_kernel") == 2
    return out


@keys
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [16, 128, 400, 1040])
def test_every_size(key, columns, dtype, device):
    checked(device, key, dtype=dtype, hidden_size=columns + 64, intermediate_size=columns)


@keys
@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8])
def test_pairs_are_added_up(key, top_k, device):
    checked(device, key, {"tokens": 3}, top_k=top_k, num_experts=128, num_local_experts=100)


@keys
@pytest.mark.parametrize("tokens", [2, 4])
def test_a_few_tokens(key, tokens, device):
    checked(device, key, {"tokens": tokens}, num_experts=128, num_local_experts=128)


@keys
@pytest.mark.parametrize("routing", ["uniform", "invalid", "nothing"])
def test_pairs_without_an_expert_add_nothing(key, routing, device):
    out = checked(device, key, {"tokens": 2, "routing": routing}, num_local_experts=12)
    assert routing != "nothing" or not out.any()


@keys
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(key, number, device):
    # a static scale makes the largest code of infinity
    out = checked(device, key, {"change": lambda x: x[0, 40].fill_(number), "finite": False})
    if number != number or key == "token":
        assert bool(out.isnan().all())


def test_zero_points_take_the_tiles(device):
    FewTokens(TritonInt8Experts, CONFIG, kInt8StaticChannelSym, kInt8DynamicTokenAsym).check(device, tiles=True)
