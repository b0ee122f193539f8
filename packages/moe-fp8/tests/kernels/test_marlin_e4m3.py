"""e4m3 in words: every code, scales far apart, groups that do not count."""

from __future__ import annotations

import pytest
import torch
from moe_core import QuantKey, kFp8StaticChannelSym, kMxfp8Static
from moe_core.kernels.gemm.plan import TileConfig
from moe_core.spec.quant_key import kFp8Static128BlockSym
from moe_fp8.kernels.marlin_e4m3 import e4m3_functions
from moe_fp8.marlin_layout import convert_e4m3
from moe_kit.marlin import dequantized_by_gemm

COLUMNS, ROWS = 256, 128
FEW, MANY = TileConfig(16, 128, 4, 2, swap_ab=True), TileConfig(64, 128, 4, 2, swap_ab=True)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


def widened(
    codes: torch.Tensor,
    scale: torch.Tensor,
    key: QuantKey,
    dtype: torch.dtype,
    device: torch.device,
    config: TileConfig = FEW,
    x: float = 1.0,
) -> torch.Tensor:
    """float32 [rows, COLUMNS]: what the product makes of weights [rows, COLUMNS] and unit vectors times ``x``."""
    found = convert_e4m3(codes.to(device)[None], scale.to(device)[None], key)
    return dequantized_by_gemm(found, 8, (codes.shape[0], COLUMNS), e4m3_functions, config, dtype, x)


def every_code() -> torch.Tensor:
    """e4m3 [ROWS, COLUMNS]: each row holds every code but NaN, each column another one in every row."""
    codes = (torch.arange(COLUMNS)[None, :] + 37 * torch.arange(ROWS)[:, None]) % 256
    return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """float64 [ROWS, COLUMNS] of e8m0 bytes [ROWS, COLUMNS / 32]."""
    return torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


@DTYPES
@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
def test_every_code_is_exact(config: TileConfig, dtype: torch.dtype, device: torch.device) -> None:
    found = widened(every_code(), torch.ones(ROWS, 1), kFp8StaticChannelSym, dtype, device, config)
    assert torch.equal(found, every_code().float())


@DTYPES
@pytest.mark.parametrize("base", [0, 1, 120, 238], ids=str)
def test_mxfp8_near_a_rows_largest_scale_is_exact(base: int, dtype: torch.dtype, device: torch.device) -> None:
    exponents = (base + torch.tensor([0, 3, 1, 7, 10, 2, 9, 0])).expand(ROWS, -1).clone()
    exponents[1::2] = exponents[1::2].flip(1)
    # of as many bits as a number of the type has
    x = 1.0 + torch.finfo(dtype).eps
    found = widened(every_code(), exponents.to(torch.uint8), kMxfp8Static, dtype, device, x=x)
    expected = (every_code().double() * powers(exponents) * x).float().double()
    normal = expected.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(found.double()[normal], expected[normal])
    # below float32's normal numbers a GPU may return 0
    assert bool(((found - expected).abs()[~normal] < torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 2.0**-126), (torch.float16, 448 * 2.0**-23)], ids=str)
def test_mxfp8_far_below_a_rows_largest_scale_is_lost(dtype: torch.dtype, lost: float, device: torch.device) -> None:
    exponents = torch.tensor([0, 140, 100, 60, 118, 110, 120, 30]).expand(ROWS, -1)
    found = widened(every_code(), exponents.to(torch.uint8), kMxfp8Static, dtype, device)
    error = (found.double() - every_code().double() * powers(exponents)).abs()
    # an interpreted number is a float32
    assert float(error.max()) <= lost * 2.0**13


@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
@DTYPES
def test_blocks_of_zeros_do_not_count(dtype: torch.dtype, config: TileConfig, device: torch.device) -> None:
    """Whatever their scale is; the other block's, a power of two, is exact."""
    codes = every_code().float()
    codes[:, :128] = 0.0
    scale = torch.tensor([[2.0**127, 2.0**-20]])
    found = widened(codes.to(torch.float8_e4m3fn), scale, kFp8Static128BlockSym, dtype, device, config)
    assert torch.equal(found, codes * 2.0**-20)


@DTYPES
@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
def test_a_rows_largest_scale_is_not_rounded(dtype: torch.dtype, config: TileConfig, device: torch.device) -> None:
    """Kernels make 16-bit numbers of codes and scales; no bit is lost of a scale that all blocks of a row have."""
    for key in (kFp8Static128BlockSym, kFp8Static128BlockSym.with_group(128, 64)):
        scale = torch.full((1, COLUMNS // key.group_shape.col), 1.0 + 2.0**-20)
        found = widened(every_code(), scale, key, dtype, device, config)
        assert torch.equal(found, every_code().float() * scale[0, 0])
        assert float(convert_e4m3(every_code()[None], scale[None], key).scales.max()) == 1.0


@pytest.mark.parametrize("rows_of_weights", [64, 128, 256], ids=str)
@pytest.mark.parametrize("rows", [16, 64], ids=["few", "many"])
@pytest.mark.parametrize("block", [(128, 128), (64, 128), (64, 64), (128, 64)], ids=str)
def test_every_block_has_its_scale(
    block: tuple[int, int], rows: int, rows_of_weights: int, device: torch.device
) -> None:
    """Powers of two, of other ratios in each row of blocks, the last of which is not whole."""
    config, rows = TileConfig(rows, rows_of_weights, 4 if rows_of_weights < 256 else 8, 2, swap_ab=True), 300
    exponents = torch.outer(torch.arange(-(-rows // block[0])), torch.arange(COLUMNS // block[1]))
    scale = torch.exp2(exponents.float() - 3)
    key = kFp8Static128BlockSym.with_group(*block)
    ones = torch.ones(rows, COLUMNS).to(torch.float8_e4m3fn)
    found = widened(ones, scale, key, torch.bfloat16, device, config)
    expected = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [64, 128], ids=str)
def test_gate_and_up_of_a_tile_have_a_pair_of_scales(rows: int) -> None:
    """Each half has its own last block, and 128 rows of words have 64 of each half."""
    half, groups = 200, 3
    scale = torch.rand(1, 2 * -(-half // rows), groups) + 0.5
    ones = torch.ones(1, 2 * half, groups * 128).to(torch.float8_e4m3fn)
    found = convert_e4m3(ones, scale, kFp8Static128BlockSym.with_group(rows, 128), gated=True)
    assert found.channel_scales is not None
    tiles = found.scales.view(1, 4, groups + 1, 2)[0, :, :groups]
    factors = found.channel_scales[0].view(-1, 2, 8)[:, :, 0]
    gate, up = scale[0].chunk(2)
    for tile in range(4):
        for part, rows_of in enumerate((gate, up)):
            made = tiles[tile, :, part] * factors[8 * tile, part]
            # relative to the row's largest, and back
            torch.testing.assert_close(made, rows_of[64 * tile // rows], rtol=2.0**-23, atol=0.0)


@DTYPES
def test_groups_of_zeros_do_not_count(dtype: torch.dtype, device: torch.device) -> None:
    codes = every_code().float()
    codes[:, 64:96] = 0.0
    exponents = torch.full((ROWS, COLUMNS // 32), 100)
    exponents[:, 2] = 254
    found = widened(codes.to(torch.float8_e4m3fn), exponents.to(torch.uint8), kMxfp8Static, dtype, device)
    assert torch.equal(found, codes * 2.0**-27)


def test_scales_that_are_not_numbers_show(device: torch.device) -> None:
    exponents = torch.full((ROWS, COLUMNS // 32), 127)
    exponents[5, 0] = 255
    found = widened(every_code(), exponents.to(torch.uint8), kMxfp8Static, torch.bfloat16, device)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], every_code().float()[:5])
    for value in (float("nan"), float("inf")):
        scale = torch.tensor([[value, 1.0]])
        found = widened(every_code(), scale, kFp8Static128BlockSym, torch.bfloat16, device)
        assert not found[:, :128].isfinite().any()
