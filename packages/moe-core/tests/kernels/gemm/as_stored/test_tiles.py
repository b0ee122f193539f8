"""What x and h are rounded to beside weights as stored: the same numbers as the reference's quantizer."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from moe_core.errors import ConfigError
from moe_core.kernels.device.casts import round_e2m1
from moe_core.kernels.gemm.as_stored.activations import code_mxfp8, quantizer
from moe_core.reference.quantization import dequantize_tensor, fake_quantize, quantize_tensor
from moe_core.spec.numerics import E2M1_VALUES
from moe_core.spec.quant_key import (
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
)

ROWS, COLUMNS = 16, 128


@triton.jit
def _quantize_kernel(x, out, scales, quant_args, quantize: tl.constexpr, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """`quantize` of [ROWS, 128]: one expert for all rows (AXIS 0), or each its own."""
    row = tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    tile = tl.load(x + place)
    if AXIS == 1:
        values, scale = quantize(tile, quant_args, (row % 2)[:, None], 1)
    else:
        values, scale = quantize(tl.trans(tile), quant_args, 1, 0)
        values = tl.trans(values)
    tl.store(out + place, values.to(tl.float32))
    if scales is not None:
        tl.store(scales + row, scale)


@triton.jit
def _code_kernel(x, out, scales, AXIS: tl.constexpr, ROWS: tl.constexpr):
    """`code_mxfp8` of [ROWS, 128], codes as float32."""
    row = tl.arange(0, ROWS)
    place = row[:, None] * 128 + tl.arange(0, 128)[None, :]
    tile = tl.load(x + place)
    group = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    if AXIS == 1:
        values, scale = code_mxfp8(tile, None, 0, 1)
        tl.store(scales + group, scale)
    else:
        values, scale = code_mxfp8(tl.trans(tile), None, 0, 0)
        values = tl.trans(values)
        tl.store(scales + group, tl.trans(scale))
    tl.store(out + place, values.to(tl.float32))


@triton.jit
def _round_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out + index, round_e2m1(tl.load(x + index)))


def original_order(values):
    """[ROWS, COLUMNS] from the order of `tiles.arrange` for words of 8 codes."""
    return values.view(ROWS, COLUMNS // 32, 4, 4, 2).permute(0, 1, 3, 4, 2).reshape(ROWS, COLUMNS)


def rounded(key, x, axis, device, input_scale=None, bits=4):
    """(float32 values in their own order, scales [ROWS] where there are any) that x and h become for ``key``."""
    values = torch.empty(1, dtype=torch.bfloat16, device=device)
    quantize, arguments = quantizer(key, bits), (values,) if input_scale is None else (values, input_scale)
    out = torch.empty(ROWS, COLUMNS, device=device)
    scaled = key in (kFp8DynamicTokenSym, kFp8Dynamic128Sym)
    scales = torch.empty(ROWS, device=device) if scaled else None
    _quantize_kernel[(1,)](x.to(device), out, scales, arguments, quantize=quantize, AXIS=axis, ROWS=ROWS)
    found = out.cpu()
    if bits is not None:
        found = found.flatten()[original_order(torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS))]
    return found, None if scales is None else scales.cpu()


def wide_range():
    """Values of many magnitudes, rows of zeros, ties, and groups with NaN, infinity or what is next to nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (ROWS, COLUMNS // 32), generator=generator).repeat_interleave(32, 1).float())
    x[1] = 0.0
    x[2, :64] = torch.arange(-32, 32) / 8.0  # ties of both element types
    x[3, :32] = 1e-30
    x[4, 0], x[5, 40] = math.inf, math.nan
    return x


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rounding", ["up", "even", "down"])
@pytest.mark.parametrize(("key", "bits"), [(kMxfp8Dynamic, 4), (kMxfp8Dynamic, None), (kMxfp4Dynamic, 4)])
def test_groups_of_32(key, bits, rounding, axis, device):
    x, key = wide_range(), key.with_rounding(rounding)
    found, _ = rounded(key, x, axis, device, bits=bits)
    expected = fake_quantize(x, key)
    assert torch.equal(found.nan_to_num(7e33), expected.nan_to_num(7e33))
    assert not torch.equal(found, x)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("key", [kFp8DynamicTokenSym, kFp8Dynamic128Sym], ids=repr)
def test_whole_tiles(key, axis, device):
    x = wide_range()
    found, scales = rounded(key, x, axis, device)
    codes, scale, *_ = quantize_tensor(x, key)
    assert torch.equal(scales.nan_to_num(7e33), scale[:, 0].nan_to_num(7e33))
    finite = scale[:, 0].isfinite()
    assert torch.equal(found[finite], codes[finite].float())
    # what the product makes of the others
    assert (found * scales[:, None])[~finite].isnan().all()


@pytest.mark.parametrize("axis", [0, 1])
def test_scale_of_an_expert(axis, device):
    x = wide_range()
    scales = torch.tensor([0.01, 0.5])
    key = kFp8StaticTensorSym
    found, _ = rounded(key, x, axis, device, scales.to(device))
    for expert, rows in enumerate((slice(0, None, 2), slice(1, None, 2))):
        quantized = quantize_tensor(x[rows], key, scale=scales[expert if axis == 1 else 1])
        expected = quantized.values.float()
        assert torch.equal(found[rows].nan_to_num(7e33), expected.nan_to_num(7e33))
        assert expected.abs().nan_to_num(0).max() == 448.0
        assert not torch.equal(dequantize_tensor(quantized, key), x[rows])


@pytest.mark.parametrize("axis", [0, 1])
def test_codes_with_their_scales(axis, device):
    x = wide_range()
    out = torch.empty(ROWS, COLUMNS, device=device)
    scales = torch.empty(ROWS, COLUMNS // 32, dtype=torch.uint8, device=device)
    _code_kernel[(1,)](x.to(device), out, scales, AXIS=axis, ROWS=ROWS)
    codes, scale, *_ = quantize_tensor(x, kMxfp8Dynamic)
    assert torch.equal(scales.cpu(), scale)
    # under the scale NaN any code is as good as another
    counts = (scale != 255).repeat_interleave(32, dim=1)
    assert torch.equal(out.cpu()[counts], codes.float()[counts])
    assert (~counts).any()


def test_every_e2m1_number_and_tie(device):
    values = torch.tensor(E2M1_VALUES[:8])
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    points = torch.cat(
        [points, torch.nextafter(points, torch.tensor(9.0)), torch.nextafter(points, torch.tensor(-9.0))]
    )
    points = torch.cat([points.clamp(-6.0, 6.0), -points.clamp(-6.0, 6.0)])
    x = torch.zeros(128)
    x[: len(points)] = points
    out = torch.empty(128, device=device)
    _round_kernel[(1,)](x.to(device), out, BLOCK=128)
    # 6 in the group: its scale is 1
    groups = torch.cat([x[:, None], torch.full((128, 31), 6.0)], dim=1)
    assert torch.equal(out.cpu(), fake_quantize(groups, kMxfp4Dynamic)[:, 0])


def test_other_keys_are_refused():
    with pytest.raises(ConfigError, match="kFp8DynamicTensorSym"):
        quantizer(kFp8DynamicTensorSym, 4)
