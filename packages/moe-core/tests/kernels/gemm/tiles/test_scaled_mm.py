"""One scale for many rows, found from the magnitudes of its parts."""

from __future__ import annotations

import pytest
import torch
from moe_core.kernels.gemm.tiles import scaled_mm
from moe_core.kernels.gemm.tiles.quantize_rows import quantize_rows
from moe_core.kernels.ops.sort import QuantizeRows


@pytest.mark.parametrize("parts", [1, 3, 1024, 1025, 2050])
def test_the_largest_of_any_number_of_parts_gives_the_scale(parts, device):
    amaxes = torch.full((parts + 1,), 0.5)
    amaxes[parts - 1], amaxes[parts] = 254.0, 1000.0  # the last counts, what lies behind it does not
    values, scales = torch.empty(2, 16, dtype=torch.int8, device=device), torch.empty(2, device=device)
    arguments = (values, amaxes.to(device).view(torch.int32), parts)
    x = torch.full((2, 16), 20.0, device=device)
    quantize_rows(QuantizeRows(x, values, scales, scaled_mm.quantize_by_amax, 16, arguments), ("all", ()), pdl=False)
    assert scales.tolist() == [2.0, 2.0]
    assert values.unique().tolist() == [10]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("columns", [1, 2])
def test_columns_that_are_filled_up_are_zeros(columns, dtype, device):
    """Of a single column, too, whose number is a constant for the compiler."""
    x = torch.randn(18, columns, device=device)
    values = torch.full((18, 128), 93, dtype=torch.uint8, device=device).view(dtype)
    scales = torch.empty(18, device=device)
    quantize_rows(QuantizeRows(x, values, scales, scaled_mm.quantize_row, 128, (values,)), ("all", ()), pdl=False)
    assert not values.float()[:, columns:].any()
    torch.testing.assert_close(
        values.float()[:, :columns] * scales[:, None], x, rtol=2**-4, atol=float(x.abs().max() / 120)
    )
