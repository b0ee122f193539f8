"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEConfig, kMxfp4Static
from moe_core.device import DeviceInfo
from moe_core.jit.launch import record
from moe_core.testing import ConformanceTests
from moe_core.testing.compile_cases import call_on_meta
from moe_mxfp4.experts.marlin import BatchedMarlinMxfp4Experts, MarlinMxfp4Experts


class TestMarlinMxfp4(ConformanceTests):
    experts = MarlinMxfp4Experts
    interpreted_every = 2


class TestBatchedMarlinMxfp4(ConformanceTests):
    experts = BatchedMarlinMxfp4Experts
    interpreted_every = 6


@pytest.mark.parametrize(("device", "kernel"), [("sm90", "words_kernel"), ("sm80", "grouped_gemm_kernel")])
def test_many_rows(device, kernel):
    """With 25 rows per expert and more sm90 dequantises words beside the tensor cores."""
    config = FusedMoEConfig(8, 2, 1024, 544, dtype=torch.bfloat16)
    target = DeviceInfo.parse(device)
    experts = MarlinMxfp4Experts(config, weight_key=kMxfp4Static, activation_key=None, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches].count(kernel) == 2
