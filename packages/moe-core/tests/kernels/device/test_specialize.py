"""Copies of a device function with other constants and other functions, side by side in one kernel."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from moe_core import ConfigError
from moe_core.kernels.device.specialize import specialize

COUNT = tl.constexpr(8)
STEP = tl.constexpr(1)


@triton.jit
def twice(x):
    return x * 2


@triton.jit
def negative(x):
    return -x


change = twice


@triton.jit
def numbers(out):
    """0, STEP, 2 STEP, … changed; COUNT of them."""
    index = tl.arange(0, COUNT)
    tl.store(out + index, change(index * STEP))


@triton.jit
def both_kernel(out, first: tl.constexpr, second: tl.constexpr):
    first(out)
    second(out + 16)


SHORT = specialize(numbers, COUNT=4, STEP=3)
NEGATIVE = specialize(numbers, change=negative)


def test_copies_have_their_own_values(device):
    out = torch.full((32,), 99, dtype=torch.int32, device=device)
    both_kernel[(1,)](out, SHORT, NEGATIVE)
    assert out.tolist() == [0, 6, 12, 18] + [99] * 12 + [0, -1, -2, -3, -4, -5, -6, -7] + [99] * 8
    out.fill_(99)
    both_kernel[(1,)](out, numbers, SHORT)
    assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14] + [99] * 8 + [0, 6, 12, 18] + [99] * 12


def test_names_that_are_not_read_are_refused():
    with pytest.raises(ConfigError, match="numbers .*SIZE"):
        specialize(numbers, SIZE=1, twice=negative, STEP=2)
