"""Weights as stored: every code, the order of columns, and layers for plans of every kind.

Layers against float64 over the same weights.  Rounding to bfloat16 is 2^-8 at most: of h, of each pair's
result and of the output.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.gemm.as_stored import tiles
from moe_core.kernels.gemm.fragments.fragment_order import as_words
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.spec.config import FusedMoEActivationFormat
from moe_core.spec.quant_key import kInt4Static, kInt4StaticAsym, kInt8StaticAsym
from moe_kit.planned import layer_error
from moe_wna16.experts.triton import TritonWNA16Experts
from moe_wna16.kernels import codes
from moe_wna16.layout import arranged_groups, by_group, zero_points

BATCHED = FusedMoEActivationFormat.BATCHED
TOLERANCE = 3 * 2**-8
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@triton.jit
def numbers_kernel(words, zeros, out, P: tl.constexpr):
    """`dequantize_codes` of int32 [16, 16]."""
    row = tl.arange(0, 16)
    tile = tl.load(words + row[:, None] * 16 + tl.arange(0, 16)[None, :])
    values = codes.dequantize_codes(tile, tl.load(zeros + row), 16 * P, out.dtype.element_ty)
    tl.store(out + row[:, None] * (16 * P) + tl.arange(0, 16 * P)[None, :], values)


@triton.jit
def arrange_kernel(x, out, P: tl.constexpr, AXIS: tl.constexpr):
    """`arrange` of [16, 128]."""
    place = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tile = tl.load(x + place)
    if AXIS == 1:
        tl.store(out + place, tiles.arrange(tile, P, 1))
    else:
        tl.store(out + place, tl.trans(tiles.arrange(tl.trans(tile), P, 0)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code(dtype, bits, device):
    """Less the smallest, the middle and the largest zero points, which are one more than any code."""
    count = 32 // bits
    size = 16 * count
    values = torch.arange(16 * size).view(16, size) % 2**bits
    zeros = torch.tensor([0, 2 ** (bits - 1), 2**bits, 1] * 4)
    stored = values.to(torch.uint8) if bits == 8 else (values[:, 0::2] | values[:, 1::2] << 4).to(torch.uint8)
    out = torch.empty(16, size, dtype=dtype, device=device)
    numbers_kernel[(1,)](as_words(stored[None])[0].to(device), zero_points(zeros, bits).to(device), out, P=count)
    expected = arranged_groups((values - zeros[:, None]).int(), bits, 1)
    assert torch.equal(out.cpu(), expected.to(dtype))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_activations_meet_their_codes(bits, axis, device):
    x = torch.arange(16 * 128, dtype=torch.int32).view(16, 128)
    out = torch.empty_like(x, device=device)
    arrange_kernel[(1,)](x.to(device), out, P=32 // bits, AXIS=axis)
    assert torch.equal(out.cpu(), arranged_groups(x, bits, 1))
    assert not torch.equal(out.cpu(), x)


def test_words_pass_or_are_padded():
    stored = torch.randint(0, 256, (2, 3, 12), dtype=torch.uint8)
    words = as_words(stored)
    assert words.data_ptr() == stored.data_ptr()
    assert words.shape == (2, 3, 3)
    for odd in (stored[:, :, :11], stored[:, :, 1:], stored.flatten()[1:67].view(2, 3, 11)):
        words = as_words(odd)
        assert words.stride(1) % 4 == 0
        found = words.view(torch.uint8)
        assert torch.equal(found[:, :, :11], odd)
        assert not found[:, :, 11:].any()
    shifted = stored.flatten()[1:33].view(2, 2, 8)
    assert torch.equal(as_words(shifted).view(torch.uint8), shifted)


def test_groups_lie_together():
    scale = torch.rand(2, 3, 5)
    assert torch.equal(by_group(scale), scale.transpose(1, 2))
    assert torch.equal(by_group(scale, 2)[:, 1::2], scale.transpose(1, 2))
    g_idx = torch.arange(40, dtype=torch.int32)[None]
    found = arranged_groups(g_idx, 4, 128)
    assert found.shape == (1, 128)
    assert found[0, :10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]
    assert not found[0, 64:].any()


def plan_of(block_m, *, tma=False, splits=(1, 1), group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[0])
    down = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {"few": plan_of(16, tma=True), "split": plan_of(16, splits=(2, 2)), "many": plan_of(64, group_m=2)}
KEYS = {
    "channel": kInt4Static.with_group(1, -1),
    "two groups": kInt4StaticAsym.with_group(1, 64),
    "four groups": kInt8StaticAsym.with_group(1, 32),
    "permuted": replace(kInt4StaticAsym.with_group(1, 64), permuted=True, pre_scaled=True),
}


def error(plan, key, device, **given):
    return layer_error(
        TritonWNA16Experts, plan, key, None, device, **({"hidden_size": 288, "intermediate_size": 160} | given)
    )


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("key", KEYS)
def test_plans(key, plan, device):
    assert error(PLANS[plan], KEYS[key], device) < TOLERANCE


def test_batched(device):
    layer = {"activation_format": BATCHED, "has_bias": True}
    assert error(PLANS["many"], KEYS["two groups"], device, tokens=18, top_k=1, **layer) < TOLERANCE
