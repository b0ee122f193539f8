"""Rounding in kernels equals torch's, on a GPU and in the interpreter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.device.casts import divide, divide_all, downcast, downcast_e4m3, round_int8


@triton.jit
def _downcast_kernel(x, out, E4M3: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    value = tl.load(x + index)
    if E4M3:
        tl.store(out + index, downcast_e4m3(value))
    else:
        tl.store(out + index, downcast(value, out.dtype.element_ty))


@triton.jit
def _divide_kernel(x, by, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, divide(tl.load(x + index), tl.load(by + index)))


@triton.jit
def _quotient_kernel(x, by, out, codes, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    quotient = divide_all(tl.load(x + index), tl.load(by + index))
    tl.store(out + index, quotient)
    tl.store(codes + index, round_int8(quotient))


def e4m3_values():
    """Every e4m3 number, every midpoint between neighbors, and their float32 neighbors."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, middles])
    points = torch.cat([points, torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(0.0))])
    points = torch.cat([points, -points])
    return torch.nn.functional.pad(points[points.abs() <= 448], (0, 2048))[:2048]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_downcast(dtype, device):
    random = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    for x in (e4m3_values(), random * 100, random * 1e-3):
        x = x.clamp(-448, 448).to(device)
        out = torch.empty(2048, dtype=dtype, device=device)
        _downcast_kernel[(1,)](x, out, dtype is torch.float8_e4m3fn, 2048)
        expected = x.to(dtype)
        assert torch.equal(out.float(), expected.float())


def test_divide_is_correctly_rounded(device):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(4096, generator=generator) * 50).to(device)
    by = (torch.rand(4096, generator=generator) + 0.01).to(device)
    out = torch.empty_like(x)
    _divide_kernel[(1,)](x, by, out, 4096)
    exact = (x.double() / by.double()).float()
    if out.is_cuda:
        assert torch.equal(out, exact)
    else:  # the interpreter rounds the product inside a fused multiply-add
        assert ((out - exact).abs() <= exact.abs() * 2**-23).all()


def test_quotients_beyond_numbers_and_their_codes(device):
    """Too large, by infinity, NaN; int8 codes tie to even and saturate, NaN becomes 0."""
    infinity, nan = float("inf"), float("nan")
    x = torch.cat([torch.arange(-512, 512) / 2, torch.randn(1016, generator=torch.Generator().manual_seed(2)) * 60])
    x = torch.cat([x, torch.tensor([3e38, -3e38, infinity, -infinity, 1.0, infinity, nan, 0.0])])
    by = torch.ones(2048)
    by[-8:] = torch.tensor([0.5, 0.5, 2.0, 2.0, infinity, infinity, 1.0, 3.0])
    out, codes = torch.empty(2048, device=device), torch.empty(2048, dtype=torch.int8, device=device)
    _quotient_kernel[(1,)](x.to(device), by.to(device), out, codes, 2048)
    exact = x / by
    assert torch.equal(out.cpu().nan_to_num(7.5, infinity, -infinity), exact.nan_to_num(7.5, infinity, -infinity))
    assert torch.equal(codes.cpu(), exact.round().clamp(-128, 127).nan_to_num(0.0).to(torch.int8))
