"""One scale for many rows, found from the magnitudes of its parts."""

from __future__ import annotations

import pytest
import torch
from moe_core.gemm import scaled_mm
from moe_core.gemm.quantize_rows import quantize_rows
from moe_core.ops.sort import QuantizeRows


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
