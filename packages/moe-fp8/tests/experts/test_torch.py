from __future__ import annotations

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    FusedMoEQuantDesc,
    QuantKey,
    dequantize_weight,
    e8m0_to_float32,
    is_e8m0,
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kMxfp8Static,
)
from moe_core.testing import ConformanceTests
from moe_fp8.experts.torch import TorchFp8Experts


class TestTorchFp8(ConformanceTests):
    experts = TorchFp8Experts


@pytest.mark.parametrize("key", [kMxfp8Static, kFp8Static128BlockE8M0Sym, kFp8Static128BlockSym], ids=str)
@pytest.mark.parametrize("codes", [(0, 254), (254, 0), (0, 0), (254, 254), (246, 247)], ids=str)
def test_the_smallest_and_the_largest_scale_beside_each_other(codes: tuple[int, int], key: QuantKey) -> None:
    """448 times 2**127 is no float32: zeros stay zeros, and inputs that undo their group's scale count."""
    generator = torch.Generator().manual_seed(sum(codes))
    group = key.group_size
    config = FusedMoEConfig(num_experts=1, top_k=1, hidden_size=2 * group, intermediate_size=128)
    experts = TorchFp8Experts(config, weight_key=key, activation_key=None)
    bits = torch.randint(0, 256, (1, 256, 2 * group), generator=generator).to(torch.uint8)
    w = bits.masked_fill_(bits & 0x7F == 0x7F, 0).view(torch.float8_e4m3fn)
    stored = torch.tensor(codes, dtype=torch.uint8).expand(1, 2 if key.group_shape.row == 128 else 256, 2)
    scale = stored.contiguous() if is_e8m0(key.scale.dtype) else e8m0_to_float32(stored)
    x = torch.randn(3, 2, group, generator=generator) * torch.exp2(127.0 - torch.tensor(codes).clamp(5, 251))[:, None]
    x[0, 1], x[1, 0] = 0.0, 0.0
    x = x.flatten(1)
    found = experts.product(x, w, FusedMoEQuantDesc(key=key, scale=scale), 0, parts=2)
    exact = x.double() @ dequantize_weight(w, scale, key, parts=2, dtype=torch.float64)[0].T
    for row, expected in zip(found.double(), exact, strict=True):
        # float32 sums of at most 256 terms
        assert float((row - expected).norm() / expected.norm()) < 2**-24 * 256**0.5


def test_a_scale_that_is_no_number_shows() -> None:
    config = FusedMoEConfig(num_experts=1, top_k=1, hidden_size=64, intermediate_size=32)
    scale = torch.full((1, 64, 2), 127, dtype=torch.uint8)
    scale[0, 1, 0] = 255
    w = torch.ones(1, 64, 64).to(torch.float8_e4m3fn)
    desc = FusedMoEQuantDesc(key=kMxfp8Static, scale=scale)
    experts = TorchFp8Experts(config, weight_key=kMxfp8Static, activation_key=None)
    found = experts.product(torch.ones(2, 64), w, desc, 0, parts=2)
    assert found.isnan().any(dim=0).nonzero().flatten().tolist() == [1]
