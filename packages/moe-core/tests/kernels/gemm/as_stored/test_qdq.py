"""Rows that are quantized and dequantized: the numbers of the reference's `fake_quantize`, in bfloat16."""

from __future__ import annotations

import pytest
import torch
from moe_core.errors import ConfigError
from moe_core.kernels.gemm.as_stored.qdq import qdq
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows
from moe_core.reference.quantization import fake_quantize
from moe_core.spec.quant_key import (
    QuantKey,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kInt8DynamicTokenSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
)

ROWS, COLUMNS, WIDTH = 7, 320, 384
DYNAMIC = (
    kFp8DynamicTokenSym,
    kInt8DynamicTokenSym,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kMxfp8Dynamic,
    kMxfp8Dynamic.with_rounding("even"),
    kMxfp4Dynamic,
)


def rows() -> torch.Tensor:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    # magnitudes from row to row, a row of zeros, one of subnormal numbers, one of nearly the largest
    return x * torch.tensor([1.0, 1e-3, 300.0, 0.0, 7.0, 1e-39, 5e37])[:, None]


def computed(x: torch.Tensor, key: QuantKey, device: torch.device, static: torch.Tensor | None = None) -> torch.Tensor:
    """Of rows that are those of tokens with one pair each, of expert 0 and 1 in turn."""
    quantizer = qdq(key, device, (static, static))
    values = torch.full((ROWS, WIDTH), torch.nan, dtype=torch.bfloat16, device=device)
    ids = (torch.arange(ROWS, dtype=torch.int32, device=device) % 2)[:, None]
    in_use = "pairs", (ids, None, 1, ROWS, 2)
    quantize_rows(quantizer.job(x.to(device), values, None, first=True), in_use, pdl=False)
    finite = x.isfinite().all(dim=1).to(device)
    assert not values[finite, COLUMNS:].any(), "columns behind the row are zeros"
    return values[:, :COLUMNS].float().cpu()


@pytest.mark.parametrize("key", DYNAMIC, ids=str)
def test_numbers_are_those_of_fake_quantize(key: QuantKey, device: torch.device) -> None:
    x = rows()
    assert torch.equal(computed(x, key, device), fake_quantize(x, key).bfloat16().float())


def test_static_scales_are_those_of_a_rows_expert(device: torch.device) -> None:
    x, scale = rows(), torch.tensor([0.5, 0.002])
    found = computed(x, kFp8StaticTensorSym, device, scale.to(device))
    for row in range(ROWS):
        expected = fake_quantize(x[row : row + 1], kFp8StaticTensorSym, scale=scale[row % 2].view(1))
        assert torch.equal(found[row], expected[0].bfloat16().float())


@pytest.mark.parametrize("key", [kFp8DynamicTokenSym, kInt8DynamicTokenSym], ids=str)
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_becomes_nan(key: QuantKey, lost: float, device: torch.device) -> None:
    x = rows()
    x[2, 17] = lost
    found = computed(x, key, device)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_other_keys_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kFp8DynamicTensorSym"):
        qdq(kFp8DynamicTensorSym)
