"""Launch parameters of W4A8: what split products leave has a place."""

from __future__ import annotations

import pytest
from moe_core.gemm.workspaces import split_workspace
from moe_int8.kernels.w4a8_rule import w4a8_plan


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("tokens", [1, 8, 100, 1000, 100000])
@pytest.mark.parametrize("shape", [(8, 2, 4096, 14336), (256, 8, 7168, 256), (128, 6, 2688, 1856), (1, 1, 128, 128)])
def test_parts_fit(shape, tokens, capability):
    experts, top_k, hidden, size = shape
    plan = w4a8_plan(tokens, top_k, experts, hidden, size, capability=capability)
    parts = split_workspace(batched=False).shape[0]
    pairs = tokens * top_k
    assert plan.gemm1.split_k == 1 or pairs * plan.gemm1.split_k * 2 * size <= parts
    assert plan.gemm2.split_k == 1 or pairs * plan.gemm2.split_k * hidden <= parts
