"""What Triton backends make of canonical weights."""

from __future__ import annotations

import pytest
import torch
from moe_int8.layout import (
    group_scales,
    int4_half,
    pack_int4,
    row_sums,
    scaled_row_sums,
)


def codes(*shape):
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 1000])
@pytest.mark.parametrize("half", [32, 64])
def test_codes_come_back(half, columns):
    w = codes(3, 5, columns)
    packed = pack_int4(w, half)
    assert packed.shape == (3, 5, -(-columns // (2 * half)) * half)
    # an arithmetic shift brings the sign along
    halves = packed.view(torch.int8).view(3, 5, -1, 1, half)
    unpacked = torch.cat((halves << 4 >> 4, halves >> 4), dim=3).flatten(2)
    assert torch.equal(unpacked[:, :, :columns], w)
    assert not unpacked[:, :, columns:].any()


def test_where_a_code_lies():
    w = torch.zeros(1, 1, 256, dtype=torch.int8)
    w[0, 0, 128 + 3], w[0, 0, 128 + 64 + 3] = -8, 5
    packed = pack_int4(w, 64)
    assert int(packed[0, 0, 64 + 3]) == 0x58
    assert int(packed.count_nonzero()) == 1


@pytest.mark.parametrize(("group_size", "groups", "padded"), [(128, 3, 3), (64, 3, 4), (32, 5, 6)])
def test_scales_lie_by_step(group_size, groups, padded):
    scale = torch.rand(2, 7, groups, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = group_scales(scale, int4_half(group_size), group_size)
    assert found.shape == (2, padded, 7)
    assert torch.equal(found[:, :groups].transpose(1, 2) * 16, scale.float())
    assert not found[:, groups:].any()


def test_sums():
    w = codes(2, 3, 96)
    scale = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(row_sums(w), w.long().sum(2).int())
    exact = (w.double() * scale.double().repeat_interleave(32, 2)).sum(2)
    assert torch.equal(scaled_row_sums(w, scale), exact.float())
