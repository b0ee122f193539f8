"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from moe_core import FusedMoEConfig, kFp8StaticTensorSym, kMxfp4Static, kMxfp8Dynamic
from moe_core.device import DeviceInfo
from moe_core.jit.launch import record
from moe_core.testing import ConformanceTests
from moe_core.testing.compile_cases import call_on_meta
from moe_mxfp4.experts.marlin import BatchedMarlinMxfp4Experts, MarlinMxfp4Experts, MarlinMxfp4QdqExperts


class TestMarlinMxfp4(ConformanceTests):
    experts = MarlinMxfp4Experts
    interpreted_every = 2


class TestBatchedMarlinMxfp4(ConformanceTests):
    experts = BatchedMarlinMxfp4Experts
    interpreted_every = 6


class TestMarlinMxfp4Qdq(ConformanceTests):
    experts = MarlinMxfp4QdqExperts
    interpreted_every = 6


@pytest.mark.parametrize(
    ("key", "kernel"), [(kMxfp8Dynamic, "words_kernel"), (kFp8StaticTensorSym, "grouped_gemm_kernel")], ids=str
)
def test_many_rows_of_quantised_activations(key, kernel):
    """Rows that depend on their expert leave h by pair, which the warp-specialised kernel does not."""
    config = FusedMoEConfig(8, 2, 1024, 544, dtype=torch.bfloat16)
    target = DeviceInfo.parse("sm90")
    experts = MarlinMxfp4QdqExperts(config, weight_key=kMxfp4Static, activation_key=key, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches].count(kernel) == 2


@pytest.mark.parametrize(("device", "kernel"), [("sm90", "words_kernel"), ("sm80", "grouped_gemm_kernel")])
def test_many_rows(device, kernel):
    """With 25 rows per expert and more sm90 dequantises words beside the tensor cores."""
    config = FusedMoEConfig(8, 2, 1024, 544, dtype=torch.bfloat16)
    target = DeviceInfo.parse(device)
    experts = MarlinMxfp4Experts(config, weight_key=kMxfp4Static, activation_key=None, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches].count(kernel) == 2
