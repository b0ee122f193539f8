"""Few tokens without tensor cores: every kind of scales, both sizes of codes, sizes that are no whole blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, kInt4Static, kInt4StaticAsym, kInt8Static, kInt8StaticAsym
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan
from moe_core.kernels.launch.launch import observe
from moe_kit.few_tokens import FewTokens
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
CONFIG = FusedMoEConfig(num_experts=5, top_k=3, hidden_size=200, intermediate_size=92, has_bias=True)


def layer(key=kInt4Static, **changes):
    return FewTokens(MarlinWNA16Experts, replace(CONFIG, **changes), key)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_kind_of_scales(key, device):
    layer(key, dtype=torch.float16 if key.group_size == 32 else torch.bfloat16).check(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", [kInt4StaticAsym, kInt4Static.with_group(1, 32), kInt8StaticAsym], ids=str)
def test_numbers_of_every_size_become_integers(key, dtype, device):
    def change(x):
        # some far larger than those that share their power of two, some too small for it, and none at all
        x[0, 7::32] *= 64
        x[0, 32:48] *= 2.0**-10
        x[0, 64:128] = 0

    layer(key, dtype=dtype).check(device, change=change)


@pytest.mark.parametrize("key", [kInt4Static, kInt8Static], ids=str)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number, key, device):
    assert not layer(key).check(device, change=lambda x: x[0, 40].fill_(number), finite=False).isfinite().any()


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("block_n", [16, 32])
@pytest.mark.parametrize("block_w", [32, 128, 256])
def test_blocks_of_every_size(block_n, block_w, device):
    experts = layer().made(device)
    config = GemvConfig(block_n, block_w, 4)
    experts.gemv_plan = lambda *arguments: GemvPlan(config, config)
    layer().check(device, tokens=2, made=experts)


@pytest.mark.parametrize("along_m", [False, True])
def test_a_few_tokens_that_may_share_experts(along_m, device):
    few = layer(num_experts=64, num_local_experts=64, top_k=2)
    experts = few.made(device)
    config = GemvConfig(16, 32, 1, along_m=along_m)
    experts.gemv_plan = lambda *arguments: GemvPlan(config, config)
    few.check(device, tokens=4, ids=torch.tensor([[3, 60], [60, 7], [3, 7], [-1, 60]]), made=experts)


def test_pairs_without_an_expert_add_nothing(device):
    layer().check(device, ids=torch.tensor([[-1, 2, 7]]))
    assert not layer().check(device, ids=torch.full((1, 3), -1)).any()


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_only_pair_of_a_token_needs_no_finalize(key, bias, device):
    launches = []
    with observe(launches.append):
        out = layer(key, top_k=1, has_bias=bias).check(device, tokens=2, ids=torch.tensor([[2], [-1]]))
    names = [one.name for one in launches]
    assert names.count("gemv_kernel") == 2
    assert "reduce_kernel" not in names
    assert out[0].any()
    assert not out[1].any()


def test_activations_that_are_not_read_in_pairs_take_the_tiles(device):
    layer(intermediate_size=91).check(device, tiles=True)
    layer().check(device, tokens=13, tiles=True)
