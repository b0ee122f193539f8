"""The table against the definition: every pair of bytes, odd widths, short last groups."""

from __future__ import annotations

import pytest
import torch
from moe_core import kMxfp4Static
from moe_core.reference.quantization import dequantize_weight
from moe_mxfp4.blocks import eighths, product
from torch import Tensor


def exact(codes: Tensor, scale: Tensor, columns: int) -> Tensor:
    """float64 [rows, columns]."""
    return dequantize_weight(codes[None], scale[None], kMxfp4Static, cols=columns, dtype=torch.float64)[0]


def test_every_two_bytes() -> None:
    two = torch.arange(2**16, dtype=torch.int32)
    codes = torch.stack((two & 0xFF, two >> 8), dim=1).to(torch.uint8).view(4096, 32)
    scale = (torch.arange(4096 * 2) % 255).to(torch.uint8).view(4096, 2)
    want = exact(codes, scale, 64) / 8
    assert torch.equal(eighths(codes, scale, 64).double(), want)


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 66, 100, 256])
def test_any_number_of_columns(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    codes = torch.randint(0, 256, (70, -(-columns // 2)), generator=generator).to(torch.uint8)
    scale = torch.randint(0, 255, (70, -(-columns // 32)), generator=generator).to(torch.uint8)
    want = exact(codes, scale, columns) / 8
    assert torch.equal(eighths(codes, scale, columns).double(), want)


def test_codes_at_an_odd_place() -> None:
    codes = torch.randint(0, 256, (129,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)[1:].view(2, 64)
    scale = torch.full((2, 4), 127, dtype=torch.uint8)
    assert torch.equal(eighths(codes, scale, 128), eighths(codes.clone(), scale, 128))


def test_blocks_of_rows_make_one_product() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (900, 1024), generator=generator).to(torch.uint8)
    scale = torch.randint(120, 130, (900, 64), generator=generator).to(torch.uint8)
    x = torch.randn(3, 2048, generator=generator)
    want = x.double() @ exact(codes, scale, 2048).T
    # float32 sums of 2048 products
    error = (product(x, codes, scale) - want).norm() / want.norm()
    assert float(error) < 2.0**-24 * 2048**0.5


@pytest.mark.parametrize("ends", [(0, 254), (254, 0), (0, 0), (254, 254), (252, 253)], ids=str)
def test_the_smallest_and_the_largest_scale_beside_each_other(ends: tuple[int, int]) -> None:
    """6 times 2**127 is no float32: zeros stay zeros, and inputs that undo their group's scale count."""
    generator = torch.Generator().manual_seed(sum(ends))
    codes = torch.randint(0, 256, (70, 32), generator=generator).to(torch.uint8)
    scale = torch.tensor(ends, dtype=torch.uint8).repeat(70, 1)
    x = torch.randn(3, 2, 32, generator=generator) * torch.exp2(127.0 - torch.tensor(ends).clamp(5, 251))[:, None]
    x[0, 1], x[1, 0] = 0.0, 0.0
    x = x.flatten(1)
    want = x.double() @ exact(codes, scale, 64).T
    for found, expected in zip(product(x, codes, scale).double(), want, strict=True):
        # float32 sums of at most 64 products
        assert float((found - expected).norm() / expected.norm()) < 2.0**-24 * 64**0.5


def test_a_scale_that_is_no_number_shows() -> None:
    codes = torch.ones(2, 32, dtype=torch.uint8)
    scale = torch.tensor([[127, 255], [127, 127]], dtype=torch.uint8)
    found = eighths(codes, scale, 64)
    assert bool(found[0, 32:].isnan().all())
    assert bool(found[1].isfinite().all())
