"""One token of e4m3 weights: without tensor cores where a row has one scale."""

from __future__ import annotations

import pytest
import torch
from moe_core import (
    FusedMoEConfig,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Static,
)
from moe_fp8.experts.marlin import MarlinFp8Experts
from moe_kit.few_tokens import FewTokens

KEYS = [kFp8StaticTensorSym, kFp8StaticChannelSym, kFp8Static128BlockSym, kMxfp8Static]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_kind_of_scales(key, dtype, device):
    config = FusedMoEConfig(num_experts=5, top_k=3, hidden_size=224, intermediate_size=160, dtype=dtype, has_bias=True)
    FewTokens(MarlinFp8Experts, config, key).check(device, tiles=key not in KEYS[:2])
