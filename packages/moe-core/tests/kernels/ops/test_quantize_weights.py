"""Weight quantizers: kernels against the torch rules bit for bit, for every grid, edge and kind of value."""

from __future__ import annotations

import math

import pytest
import torch
from moe_core.errors import ConfigError, TensorError
from moe_core.kernels.ops import quantize_weights as module
from moe_core.kernels.ops.quantize_weights import quantize_weights
from moe_core.reference.quantization import dequantize_weight, quantize_weight
from moe_core.spec.numerics import AMAX_FLOOR
from moe_core.spec.quant_key import (
    kFp8Static128BlockE8M0Sym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kInt4Static32,
    kInt4Static32Asym,
    kInt8StaticChannelSym,
    kInt8StaticTensorSym,
    kMxfp4Static,
    kMxfp8Static,
)

IN_KERNELS = {
    "tensor": kFp8StaticTensorSym,
    "channel": kFp8StaticChannelSym,
    "block": kFp8Static128BlockSym,
    "block e8m0": kFp8Static128BlockE8M0Sym,
    "block 64x64": kFp8Static128BlockSym.with_group(64, 64),
    "block 48x40": kFp8Static128BlockSym.with_group(48, 40),
    "mxfp8": kMxfp8Static,
    "group 64": kFp8Static128BlockSym.with_group(1, 64),
    "int8 channel": kInt8StaticChannelSym,
    "int8 tensor": kInt8StaticTensorSym,
}
IN_TORCH = {
    "mxfp4": kMxfp4Static,
    "mxfp4 even": kMxfp4Static.with_rounding("even"),
    "int4": kInt4Static32,
    "int4 asymmetric": kInt4Static32Asym,
}
KERNELS = pytest.mark.parametrize("name", IN_KERNELS)


def values(shape: tuple[int, int, int], dtype: torch.dtype, *, numbers_only: bool = True) -> torch.Tensor:
    """Matrices of several magnitudes, one of zeros, rows of zeros and of ties; NaN and infinity where asked for."""
    generator = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=generator)
    w[-1] *= 40.0
    w[0, : shape[1] // 2] = 0.0
    w[1:, ::7] = 0.0
    w[1:, 1::7] = (w[1:, 1::7] * 8).round() / 16
    w[1:, 2::7] *= 1e-7
    if not numbers_only:
        w[0, -1, 3], w[1, 0, 5] = math.nan, -math.inf
    return w.to(dtype)


def same(found: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; a NaN has only to be one."""
    assert found.dtype is want.dtype
    assert found.shape == want.shape
    if want.dtype.is_floating_point:
        wide, expected = found.float(), want.float()
        assert torch.equal(wide.isnan(), expected.isnan())
        assert torch.equal(wide.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
    else:
        assert torch.equal(found, want)


def shape_for(name: str) -> tuple[int, int, int]:
    """[E, 2N, K] with edges of blocks and groups; small, since the interpreter is slow."""
    return (2, 2 * 139, 168) if name.startswith("block") else (3, 2 * 7, 160 if name == "mxfp8" else 168)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@KERNELS
def test_kernels_give_the_bits_of_the_torch_rules(name: str, dtype: torch.dtype, device: torch.device) -> None:
    key, w = IN_KERNELS[name], values(shape_for(name), dtype, numbers_only=dtype is not torch.float16)
    want = quantize_weight(w, key, parts=2)
    found = quantize_weights(w.to(device), key, parts=2, backend="triton")
    same(found.values.cpu(), want.values)
    same(found.scale.cpu(), want.scale)
    assert found.zero_point is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_pairs_of_mxfp4(dtype: torch.dtype, device: torch.device) -> None:
    """Ties, zeros of either sign, extremes; what shares a group with NaN or infinity has a scale that says it."""
    w = values((3, 2 * 7, 160), dtype, numbers_only=dtype is not torch.float16)
    w[2, 0, :16] = (
        torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2)
        * torch.tensor([[1.0], [-1.0]]).repeat(1, 8).flatten()
    )
    w[2, 0, 16:32] = -0.0
    largest = torch.finfo(dtype).max
    w[2, 1, :32] = torch.tensor([largest, -largest, largest / 6, 1.0] * 8)
    want = quantize_weight(w, kMxfp4Static, parts=2)
    out = torch.full(want.values.shape, 77, dtype=torch.uint8, device=device)
    found = quantize_weights(w.to(device), kMxfp4Static, parts=2, out=out, backend="triton")
    assert found.values is out
    assert torch.equal(found.scale.cpu(), want.scale)
    counts = (want.scale != 255).repeat_interleave(16, dim=2)
    assert torch.equal(found.values.cpu()[counts], want.values[counts])
    assert bool(counts.all()) == (dtype is not torch.float16)


@pytest.mark.parametrize("name", [*IN_KERNELS, *IN_TORCH])
def test_the_torch_code_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key = {**IN_KERNELS, **IN_TORCH}[name]
    w = values((3, 64, 96), torch.bfloat16)
    monkeypatch.setattr(module, "_TORCH_CHUNK", 64 * 96)
    found, want = quantize_weights(w, key, parts=2, backend="torch"), quantize_weight(w, key, parts=2)
    same(found.values, want.values)
    same(found.scale, want.scale)
    assert (found.zero_point is None) == (want.zero_point is None)
    if want.zero_point is not None and found.zero_point is not None:
        assert torch.equal(found.zero_point, want.zero_point)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@KERNELS
def test_zeros_are_zeros(name: str, backend: str, device: torch.device) -> None:
    key = IN_KERNELS[name]
    found = quantize_weights(torch.zeros(shape_for(name), device=device), key, parts=2, backend=backend)
    assert not bool(found.values.float().any())
    scale = found.scale.float() if found.scale.dtype is torch.float32 else torch.exp2(found.scale.float() - 127)
    assert float(scale.min()) >= AMAX_FLOOR / key.dtype.max_value * (1 - 2.0**-23)
    values = dequantize_weight(found.values, found.scale, key, parts=2)
    assert torch.equal(values, torch.zeros_like(values))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@KERNELS
def test_results_go_where_they_are_wanted(name: str, backend: str, device: torch.device) -> None:
    key = IN_KERNELS[name]
    w = values(shape_for(name), torch.bfloat16).to(device)
    want = quantize_weights(w, key, parts=2, backend=backend)
    out, scale = torch.empty_like(want.values), torch.empty_like(want.scale)
    strided = torch.zeros(*w.shape[:2], w.shape[2] + 3, dtype=w.dtype, device=device)[:, :, 1:-2].copy_(w)
    found = quantize_weights(strided, key, parts=2, out=out, scale_out=scale, backend=backend)
    assert found.values is out
    assert found.scale is scale
    same(out, want.values)
    same(scale, want.scale)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
@KERNELS
def test_nothing_to_quantize(name: str, shape: tuple[int, int, int]) -> None:
    found = quantize_weights(torch.zeros(shape), IN_KERNELS[name], parts=2)
    assert tuple(found.values.shape) == shape


def test_what_is_refused(device: torch.device) -> None:
    w = torch.zeros(2, 6, 8)
    with pytest.raises(TensorError, match="w has shape"):
        quantize_weights(w[0], kMxfp8Static)
    with pytest.raises(TensorError, match="w .*torch.int8"):
        quantize_weights(w.to(torch.int8), kMxfp8Static)
    with pytest.raises(TensorError, match="6 rows"):
        quantize_weights(w, kMxfp8Static, parts=4)
    with pytest.raises(TensorError, match=r"out .*\[2, 6, 7\]"):
        quantize_weights(w, kMxfp8Static, out=torch.zeros(2, 6, 7, dtype=torch.float8_e4m3fn))
    with pytest.raises(TensorError, match="scale_out"):
        quantize_weights(w, kFp8StaticTensorSym, parts=2, scale_out=torch.zeros(2, 2).mT)
    with pytest.raises(ConfigError, match="MXFP4"):
        quantize_weights(w.to(device), kInt4Static32, backend="triton")
    with pytest.raises(ConfigError, match="8 columns"):
        quantize_weights(w.to(device), kMxfp4Static, backend="triton")
    with pytest.raises(ConfigError, match="32768"):
        quantize_weights(w.to(device), kFp8Static128BlockSym.with_group(512, 512), backend="triton")


@pytest.mark.parametrize("rounding", ["even", "down"])
def test_kernels_do_not_round_scales_another_way_than_the_key(rounding: str, device: torch.device) -> None:
    key = kMxfp8Static.with_rounding(rounding)
    w = torch.randn(1, 4, 96, device=device)
    with pytest.raises(ConfigError, match="rounded up"):
        quantize_weights(w, key, backend="triton")
    codes, scale, *_ = quantize_weights(w, key)
    want = quantize_weight(w.cpu(), key)
    assert torch.equal(codes.cpu().view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(scale.cpu(), want.scale)
