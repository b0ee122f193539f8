"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_core import FusedMoEConfig, QuantKey, kFp8DynamicTokenSym, kInt4Static
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_wna16.experts.triton import TritonWNA16Experts


class TestTritonWNA16(ConformanceTests):
    experts = TritonWNA16Experts
    interpreted_every = 6


@pytest.mark.parametrize(("key", "expected"), [(None, torch.float16), (kFp8DynamicTokenSym, torch.float32)], ids=str)
def test_scratch_memory_of_pre_scaled_columns(key: QuantKey | None, expected: torch.dtype) -> None:
    """Twice the bytes only where what an activation function makes is quantized."""
    config = FusedMoEConfig(8, 2, 256, 128, dtype=torch.float16)
    pre_scaled, target = replace(kInt4Static, pre_scaled=True), DeviceInfo.parse("sm90")
    experts = TritonWNA16Experts(config, weight_key=pre_scaled, activation_key=key, device=target)
    dtypes = {spec.name: spec.dtype for spec in experts.workspaces(4)}
    assert dtypes["h"] is dtypes["gathered"] is expected
