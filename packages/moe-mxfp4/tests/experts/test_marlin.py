"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from moe_core import (
    FusedMoEActivationFormat,
    FusedMoEConfig,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Dynamic,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.kernels.launch.launch import record
from moe_core.spec.device import DeviceInfo
from moe_core.testing import ConformanceTests
from moe_core.testing.cases import Case
from moe_core.testing.harness import Place, call, make_kernel, make_problem
from moe_core.testing.meta_layers import call_on_meta
from moe_mxfp4.experts.marlin import BatchedMarlinMxfp4Experts, MarlinMxfp4Experts, MarlinMxfp4QdqExperts
from moe_mxfp4.experts.triton import TritonMxfp4Experts

STANDARD, BATCHED = FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED


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
    ("key", "layout", "kernel"),
    [
        (kMxfp8Dynamic, STANDARD, "words_kernel"),
        (kMxfp8Dynamic, BATCHED, "words_kernel"),
        (kFp8StaticTensorSym, STANDARD, "grouped_gemm_kernel"),
        (kFp8StaticTensorSym, BATCHED, "words_kernel"),
    ],
    ids=str,
)
def test_many_rows_of_quantized_activations(key, layout, kernel):
    """Rows that depend on their expert leave h by pair, which the warp-specialized kernel does not, nor is asked for.

    Batched rows have one order.
    """
    config = FusedMoEConfig(8, 2, 1024, 544, dtype=torch.bfloat16, activation_format=layout, max_num_tokens=400)
    target = DeviceInfo.parse("sm90")
    experts = MarlinMxfp4QdqExperts(config, weight_key=kMxfp4Static, activation_key=key, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches].count(kernel) == 2
    assert experts.plan(400).gemm1.warp_specialized is (kernel == "words_kernel")


@pytest.mark.parametrize(("key", "by_vectors"), [(kMxfp4Dynamic, False), (kFp8DynamicTokenSym, True)], ids=str)
def test_router_weights_on_the_input_come_before_its_scales(key, by_vectors, device):
    """Scales that are powers of two are other ones for x than for x times its router weight, also of one token."""
    config = FusedMoEConfig(8, 1, 256, 128, dtype=torch.bfloat16, apply_router_weight_on_input=True)
    problem = make_problem(Case("values", config, kMxfp4Static, key, tokens=1), device)
    place = Place(device, DeviceInfo.current(device) if device.type == "cuda" else DeviceInfo.parse("sm80"))
    kernels = [make_kernel(experts, problem, place) for experts in (MarlinMxfp4QdqExperts, TritonMxfp4Experts)]
    assert (kernels[0].experts.gemv_plan(1) is not None) is by_vectors
    found, other = (call(kernel, problem).double() for kernel in kernels)
    assert (found - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize(("device", "kernel"), [("sm90", "words_kernel"), ("sm80", "grouped_gemm_kernel")])
def test_many_rows(device, kernel):
    """With 25 rows per expert and more sm90 dequantizes words beside the tensor cores."""
    config = FusedMoEConfig(8, 2, 1024, 544, dtype=torch.bfloat16)
    target = DeviceInfo.parse(device)
    experts = MarlinMxfp4Experts(config, weight_key=kMxfp4Static, activation_key=None, device=target)
    with record() as launches:
        call_on_meta(experts, 400)
    assert [one.name for one in launches].count(kernel) == 2
