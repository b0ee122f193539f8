"""Weights as stored: every code with every scale that a type holds, scales of steps, and plans of every kind.

Layers against float64 over the same weights.  Rounding to bfloat16 is 2^-8 at most: of h, of each pair's
result and of the output.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.gemm.fragments.fragment_order import as_words
from moe_core.kernels.gemm.plan import TileConfig, TilePlan
from moe_core.spec.numerics import E2M1_VALUES
from moe_core.spec.quant_key import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_kit.planned import layer_error
from moe_mxfp4.experts.triton import TritonMxfp4Experts
from moe_mxfp4.kernels import e2m1
from moe_mxfp4.scales import LARGEST, group_scales, step_scales

TOLERANCE = 3 * 2**-8
#: the smallest byte whose scale times 0.5 the type holds
SMALLEST = {torch.bfloat16: LARGEST - 132, torch.float16: LARGEST - 23, torch.float32: LARGEST - 148}


@triton.jit
def _numbers_kernel(words, scales, out, dtype: tl.constexpr):
    """`dequantize_e2m1` of int32 [16, 16]."""
    row = tl.arange(0, 16)
    tile = tl.load(words + row[:, None] * 16 + tl.arange(0, 16)[None, :])
    values = e2m1.dequantize_e2m1(tile, tl.load(scales + row), 128, dtype)
    tl.store(out + row[:, None] * 128 + tl.arange(0, 128)[None, :], values.to(tl.float32))


def original_order(values):
    """[rows, 128] from the order of `tiles.arrange` for words of 8 codes."""
    # `arrange` puts column (unit, thread, of its pair, pair) at (unit, pair, thread, of its pair)
    place = torch.arange(128).view(4, 4, 2, 4).permute(0, 3, 1, 2).flatten()
    found = torch.empty_like(values)
    found[:, place] = values
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_code_with_every_scale(dtype, device):
    codes = ((torch.arange(128)[None, :] + 3 * torch.arange(16)[:, None]) % 16).to(torch.uint8)
    words = as_words((codes[:, 0::2] | codes[:, 1::2] << 4)[None])[0].to(device)
    values = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes.long()]
    everything = torch.arange(SMALLEST[dtype], LARGEST + 1, dtype=torch.int64)
    out = torch.empty(16, 128, device=device)
    for chunk in everything.split(64):
        powers = torch.full((64,), LARGEST)
        powers[: len(chunk)] = chunk
        scales = powers.view(16, 4).to(torch.uint8).view(torch.int32).flatten()
        _numbers_kernel[(1,)](words, scales.to(device), out, dtype=getattr(tl, str(dtype).removeprefix("torch.")))
        expected = values * torch.exp2((powers - LARGEST).double()).view(16, 4).repeat_interleave(32, dim=1)
        assert torch.equal(original_order(out.cpu()).double(), expected)


def test_scales_of_steps():
    """Relative to the largest of a row that counts; what is beyond the last group is finite."""
    codes = torch.full((1, 3, 80), 0x21, dtype=torch.uint8)
    codes[0, 1, 16:32] = 0x80  # 0 and -0: no numbers
    codes[0, 2] = 0
    scale = torch.tensor([[[127, 120, 0, 1, 126], [3, 254, 1, 2, 3], [9, 0, 254, 7, 8]]], dtype=torch.uint8)
    scales, factors = step_scales(codes, scale, 160)
    assert scales.shape == (1, 2, 3)
    found = scales.transpose(1, 2).contiguous().view(torch.uint8)[0]
    assert found[0].tolist() == [253, 246, 126, 127, 252, 0, 0, 0]
    assert found[1, [0, 2, 3, 4]].tolist() == [253, 251, 252, 253]
    assert factors.tolist() == [[1.0, 2.0**-124, 2.0**-127]]
    groups, same = group_scales(codes, scale, 160)
    assert torch.equal(same, factors)
    assert groups.shape == (1, 3, 8)
    assert groups[0, 0].tolist() == [127, 120, 0, 1, 126, 0, 0, 0]


def plan_of(block_m, *, tma=False, splits=(1, 1), group_m=1):
    up = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[0])
    down = TileConfig(block_m, 128, 4, 2, group_m, True, tma, splits[1])
    return TilePlan(up, down, pdl=True)


PLANS = {"few": plan_of(16, tma=True), "split": plan_of(16, splits=(2, 2)), "many": plan_of(64, group_m=2)}
KEYS = {
    "16-bit": None,
    "mxfp8": kMxfp8Dynamic,
    "token": kFp8DynamicTokenSym,
    "128": kFp8Dynamic128Sym,
    "static": kFp8StaticTensorSym,
}


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("key", KEYS)
def test_plans(key, plan, device):
    layer = {"hidden_size": 288, "intermediate_size": 160}
    assert layer_error(TritonMxfp4Experts, PLANS[plan], kMxfp4Static, KEYS[key], device, **layer) < TOLERANCE
