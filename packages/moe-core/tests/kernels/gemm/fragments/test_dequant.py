"""Every code becomes its number, exactly and in its column, in every type of activations."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core.kernels.device.casts import INTERPRET
from moe_core.kernels.gemm.fragments.dequant import integers, pair, zero_offset
from moe_core.kernels.gemm.fragments.fragment_order import order_words
from torch import Tensor

ROWS, COLUMNS = 16, 256


@triton.jit
def widen_kernel(words, zeros, scales, out, BITS: tl.constexpr, ZERO: tl.constexpr, SCALE: tl.constexpr):
    N: tl.constexpr = 16
    W: tl.constexpr = 256 * BITS // 32
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.arange(0, N)
    tile = tl.load(words + row[:, None] * W + tl.arange(0, W)[None, :])
    offset = tl.broadcast_to(zero_offset(tl.load(zeros + row), BITS, dtype)[:, None], (N, W))
    scale = tl.load(scales + row)
    if not INTERPRET and dtype != tl.float32:
        scale = pair(scale, dtype)
    scale = tl.broadcast_to(scale[:, None], (N, W))
    if ZERO and SCALE:
        numbers = integers(tile, offset, scale, BITS, dtype)
    elif ZERO:
        numbers = integers(tile, offset, None, BITS, dtype)
    elif SCALE:
        numbers = integers(tile, None, scale, BITS, dtype)
    else:
        numbers = integers(tile, None, None, BITS, dtype)
    tl.store(out + row[:, None] * 256 + tl.arange(0, 256)[None, :], numbers.to(dtype))


def _codes(bits: int) -> Tensor:
    """Every code in every row, at other columns."""
    codes = torch.arange(COLUMNS).repeat(ROWS, 1) % 2**bits
    return torch.stack([codes[row].roll(7 * row) for row in range(ROWS)]).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_become_numbers(
    bits: int, symmetric: bool, scaled: bool, dtype: torch.dtype, device: torch.device
) -> None:
    codes = _codes(bits)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    words = order_words(packed[None], COLUMNS, bits)[0].transpose(0, 1).flatten(1)
    # zero points go up to one more than codes do
    zeros = torch.linspace(0, 2**bits, ROWS).round()
    # powers of two: no rounding that the interpreter does not do
    scales = torch.exp2(torch.arange(ROWS) % 5 - 3.0)
    out = torch.empty(ROWS, COLUMNS, dtype=dtype, device=device)
    widen_kernel[(1,)](
        words.to(device), zeros.to(device), scales.to(device), out, BITS=bits, ZERO=not symmetric, SCALE=scaled
    )
    expected = codes.double() - (2.0 ** (bits - 1) if symmetric else zeros.double()[:, None])
    expected *= scales.double()[:, None] if scaled else 1.0
    assert torch.equal(out.cpu().double(), expected)
