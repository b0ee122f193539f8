"""Products with blocks of dequantized rows, against whole dequantized matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import QuantKey
from moe_core.reference.quantization import dequantize_weight, quantize_weight
from moe_core.spec.quant_key import GroupShape
from moe_wna16 import blocks
from moe_wna16.blocks import GroupedCodes
from moe_wna16.keys import BASES, GROUPS, SCALE_DTYPES


def matrix(key: QuantKey, rows: int, columns: int) -> tuple[GroupedCodes, torch.Tensor]:
    """A random matrix, and its values in float64."""
    generator = torch.Generator().manual_seed(rows + columns)
    w = torch.randn(1, rows, columns, generator=generator)
    g_idx, groups = None, None
    if key.permuted:
        # some of them empty; one scale per row is one group
        groups = 1 if key.group_shape.col == -1 else 7
        g_idx = torch.randint(0, min(groups, 5), (1, columns), generator=generator, dtype=torch.int32)
    found = quantize_weight(w, key, g_idx=g_idx, groups=groups)
    values = dequantize_weight(
        *found[:2], key, zero_point=found.zero_point, g_idx=g_idx, cols=columns, dtype=torch.float64
    )
    zero_point = None if found.zero_point is None else found.zero_point[0]
    return GroupedCodes(key, found.values[0], found.scale[0], zero_point, None if g_idx is None else g_idx[0]), values[
        0
    ]


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("base", BASES, ids=lambda key: key.dtype.name)
def test_is_that_of_the_matrix(
    base: QuantKey, group: GroupShape, permuted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several blocks, of which the last is smaller
    monkeypatch.setattr(blocks, "_BLOCK", 1000)
    for columns in (256, 200, 129, 31, 1):
        for dtype in SCALE_DTYPES:
            key = replace(base.with_group(1, group.col).with_scale_dtype(dtype), permuted=permuted)
            one, w = matrix(key, 22, columns)
            x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
            expected = x.double() @ w.T
            # float32 sums of that many terms
            limit = 2.0**-23 * columns**0.5 * (x.double().abs() @ w.abs().T)
            assert bool(((one.product(x).double() - expected).abs() <= limit).all()), (columns, dtype)


def test_no_rows_of_activations() -> None:
    one, _ = matrix(BASES[0], 22, 64)
    assert one.product(torch.empty(0, 64)).shape == (0, 22)


def test_zero_points_beyond_the_codes() -> None:
    """16 and 256, of tools that store zero points less one."""
    for key, largest in ((BASES[1], 16), (BASES[3], 256)):
        one, _ = matrix(key, 4, 128)
        zero = replace(one, zero_point=torch.full((4, 1), largest, dtype=torch.int32), scale=torch.ones(4, 1))
        codes = zero.product(torch.eye(128)).T + largest
        assert float(codes.min()) >= 0
        assert torch.equal(
            replace(zero, zero_point=torch.zeros(4, 1, dtype=torch.uint8)).product(torch.eye(128)).T, codes
        )
