from __future__ import annotations

import math

import torch
from moe_core.spec.numerics import E2M1_VALUES, e8m0_to_float32


def test_e8m0_is_exact_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = e8m0_to_float32(codes)
    expected = torch.tensor([2.0 ** (c - 127) for c in range(255)], dtype=torch.float64)
    assert torch.equal(values[:255].double(), expected)
    assert math.isnan(values[255])


def test_e8m0_agrees_with_torch_own_type() -> None:
    codes = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(e8m0_to_float32(codes), codes.view(torch.float8_e8m0fnu).float())
    assert torch.equal(e8m0_to_float32(codes.view(torch.float8_e8m0fnu)), e8m0_to_float32(codes))


def test_e2m1_values_follow_from_the_bits() -> None:
    for code, value in enumerate(E2M1_VALUES):
        exponent, mantissa = (code >> 1) & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert value == (-magnitude if code & 8 else magnitude)
