"""Few tokens of e2m1 weights without tensor cores: sizes that are no whole steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, MoEActivation, kMxfp4Static
from moe_kit.few_tokens import FewTokens
from moe_mxfp4.experts.marlin import MarlinMxfp4Experts

CONFIG = FusedMoEConfig(num_experts=32, top_k=4, hidden_size=224, intermediate_size=160, has_bias=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_token(dtype, device):
    FewTokens(MarlinMxfp4Experts, replace(CONFIG, dtype=dtype), kMxfp4Static).check(device)


def test_one_token_of_gpt_oss(device):
    config = replace(CONFIG, activation=MoEActivation.SWIGLUOAI, has_bias=True)
    FewTokens(MarlinMxfp4Experts, config, kMxfp4Static).check(device)
