"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch
from moe_core import FusedMoEConfig, FusedMoEKernel, kFp8DynamicTokenSym, kMxfp4Static
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.testing import ConformanceTests, expected_output, make_inputs, make_weights
from moe_core.testing.conformance import place_for
from moe_core.testing.harness import one_thread
from moe_mxfp4.experts.marlin_fp8 import MarlinMxfp4Fp8Experts


class TestMarlinMxfp4Fp8(ConformanceTests):
    experts = MarlinMxfp4Fp8Experts
    interpreted_every = 6


def test_groups_that_are_left_out_are_told() -> None:
    """Scales of a row far apart: what the kernel computes with is what `requantized` says, and no more is lost."""
    place = place_for(MarlinMxfp4Fp8Experts.claims)
    assert place is not None
    config = FusedMoEConfig(num_experts=3, top_k=2, hidden_size=160, intermediate_size=96)
    weights = make_weights(config, kMxfp4Static, kFp8DynamicTokenSym, seed=1)
    assert weights.w13_scale is not None
    spread = torch.randint(0, 20, weights.w13_scale.shape, generator=torch.Generator().manual_seed(2))
    weights = replace(weights, w13_scale=(125 - spread).to(torch.uint8))
    experts = MarlinMxfp4Fp8Experts(
        config, weight_key=kMxfp4Static, activation_key=kFp8DynamicTokenSym, device=place.target
    )
    told = experts.requantized(weights)
    lost = told.w13 != weights.w13
    top = (125 - spread).amax(dim=2, keepdim=True)
    allowed = (125 - spread) <= top - 12
    assert bool(lost.any())
    assert not bool((lost & ~allowed.repeat_interleave(16, dim=2)).any())
    assert experts.requantized(told) is told
    inputs = make_inputs(config, 7, seed=3)
    routing = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
    expected = expected_output(inputs.x, told, config, **routing)
    with one_thread():
        given = weights.to(place.device)
        kernel = FusedMoEKernel(experts, experts.convert(given), default_prepare_finalize(config))
        there = inputs.to(place.device)
        found = kernel.apply(there.x, topk_weights=there.topk_weights, topk_ids=there.topk_ids)
    expected.compare(found.cpu(), "groups left out")
