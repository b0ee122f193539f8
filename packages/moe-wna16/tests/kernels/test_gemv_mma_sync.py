"""Few tokens of 4-bit integers by `mma.sync`: every kind of scales."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEConfig, kInt4Static, kInt4StaticAsym
from moe_core.gemm.heuristics.gemv import GemvConfig, GemvPlan
from moe_core.jit.launch import observe
from moe_core.testing.few_tokens import FewTokens
from moe_core.testing.planned import with_gemv
from moe_wna16.experts.marlin import MarlinWNA16Experts

KEYS = [
    kInt4Static,
    kInt4Static.with_group(1, 32),
    kInt4Static.with_group(1, -1),
    kInt4StaticAsym.with_group(1, 64),
    kInt4StaticAsym.with_group(1, -1),
]


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_kind_of_scales(key, block_n, device):
    config = GemvConfig(block_n, 128, 4, mma_sync=True)
    dtype = torch.float16 if key.group_size == 32 else torch.bfloat16
    sizes = {"num_experts": 5, "top_k": 3, "hidden_size": 456, "intermediate_size": 348}
    layer = FusedMoEConfig(**sizes, has_bias=True, dtype=dtype)
    launches = []
    with observe(launches.append):
        FewTokens(with_gemv(MarlinWNA16Experts, GemvPlan(config, config, pdl=True)), layer, key).check(device)
    assert [one.name for one in launches].count("gemv_mma_kernel") == 2
