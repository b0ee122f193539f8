"""e2m1 in words: every code, scales far apart, groups that do not count."""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.spec.numerics import E2M1_VALUES
from moe_kit.marlin import dequantized_by_gemm, multiplied_by_gemv
from moe_mxfp4.kernels.marlin_e2m1 import e2m1_functions, e2m1_gemv
from moe_mxfp4.marlin_layout import convert_e2m1

COLUMNS, ROWS = 256, 128
FEW, MANY = TileConfig(8, 128, 4, 2, swap_ab=True), TileConfig(64, 128, 4, 2, swap_ab=True)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def widened(
    codes: torch.Tensor,
    exponents: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    config: TileConfig | None = FEW,
    x: float = 1.0,
) -> torch.Tensor:
    """float32 [ROWS, COLUMNS]: what the product makes of codes [ROWS, COLUMNS] and unit vectors times ``x``.

    Without a ``config`` it is that without tensor cores.
    """
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    found = convert_e2m1(packed.to(device)[None], exponents.to(torch.uint8).to(device)[None], COLUMNS)
    if config is None:
        rows = (x * torch.eye(COLUMNS)).to(dtype).to(device)
        return multiplied_by_gemv(found, 4, e2m1_gemv(), ROWS, rows).cpu().T
    return dequantized_by_gemm(found, 4, (ROWS, COLUMNS), e2m1_functions, config, dtype, x)


def every_code() -> torch.Tensor:
    """uint8 [ROWS, COLUMNS]: every code at every place of a word."""
    return ((torch.arange(COLUMNS)[None, :] * 5 // 4 + 7 * torch.arange(ROWS)[:, None]) % 16).to(torch.uint8)


def values(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes.long()]


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """float64 [ROWS, COLUMNS] of e8m0 bytes [ROWS, COLUMNS / 32]."""
    return torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


@pytest.mark.diagonal(2)
@pytest.mark.parametrize("config", [FEW, MANY, None], ids=str)
@pytest.mark.parametrize("base", [0, 1, 120, 243])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_near_a_rows_largest_scale_every_code_is_exact(
    config: TileConfig | None, base: int, dtype: torch.dtype, device: torch.device
) -> None:
    exponents = (base + torch.tensor([0, 3, 1, 7, 10, 2, 9, 0])).expand(ROWS, -1).clone()
    exponents[1::2] = exponents[1::2].flip(1)
    # of as many bits as a number of the type has
    x = 1.0 + torch.finfo(dtype).eps
    found = widened(every_code(), exponents, dtype, device, config, x=x)
    expected = (values(every_code()) * powers(exponents) * x).float().double()
    normal = expected.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(found.double()[normal], expected[normal])
    # below float32's normal numbers a GPU may return 0
    assert bool(((found - expected).abs()[~normal] < torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2.0**-126), (torch.float16, 6 * 2.0**-23)], ids=str)
def test_far_below_a_rows_largest_scale_is_lost(dtype: torch.dtype, lost: float, device: torch.device) -> None:
    exponents = torch.tensor([0, 140, 100, 60, 118, 110, 120, 30]).expand(ROWS, -1)
    found = widened(every_code(), exponents, dtype, device)
    error = (found.double() - values(every_code()) * powers(exponents)).abs()
    # an interpreted number is a float32
    assert float(error.max()) <= lost * 2.0**13


@DTYPES
def test_groups_of_zeros_do_not_count(dtype: torch.dtype, device: torch.device) -> None:
    codes = every_code()
    codes[:, 64:96] = 8 * (torch.arange(32) % 2).to(torch.uint8)  # of both signs
    exponents = torch.full((ROWS, COLUMNS // 32), 100)
    exponents[:, 2] = 254
    found = widened(codes, exponents, dtype, device)
    assert torch.equal(found.double(), values(codes) * 2.0**-27)


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    codes = every_code()
    codes[3] = 0
    exponents = torch.full((ROWS, COLUMNS // 32), 127)
    exponents[3] = 254
    found = widened(codes, exponents, torch.bfloat16, device)
    assert torch.equal(found.double(), values(codes))


def test_scales_that_are_not_numbers_show(device: torch.device) -> None:
    exponents = torch.full((ROWS, COLUMNS // 32), 127)
    exponents[5, 0] = 255
    found = widened(every_code(), exponents, torch.bfloat16, device)
    assert found[5].isnan().all()
    assert torch.equal(found[:5].double(), values(every_code())[:5])
