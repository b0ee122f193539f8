"""On a GPU if there is one, else through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from moe_core import FusedMoEConfig, dequantize_weight, kMxfp4Static, kMxfp8Dynamic
from moe_core.testing import ConformanceTests, make_weights
from moe_core.testing.meta_layers import meta_layer_weights
from moe_mxfp4.experts.triton import TritonMxfp4Experts


class TestTritonMxfp4(ConformanceTests):
    experts = TritonMxfp4Experts
    interpreted_every = 6


class ScaledMxfp4Experts(TritonMxfp4Experts):
    """Codes multiplied with their scales, on devices too whose tensor cores do not: there Triton widens them."""

    claims = replace(TritonMxfp4Experts.claims, keys=((kMxfp4Static, kMxfp8Dynamic),))
    scaled = True


def test_codes_that_are_multiplied_with_their_scales_are_exact_or_zeros() -> None:
    """Tensor cores know no scale below 2**-127 of a row's largest, and its byte, 0, is none of 0."""
    config = FusedMoEConfig(num_experts=1, top_k=1, hidden_size=128, intermediate_size=32)
    weights = make_weights(config, kMxfp4Static, kMxfp8Dynamic, seed=0)
    assert weights.w13_scale is not None
    scale = torch.tensor([254, 127, 126, 0], dtype=torch.uint8).expand(weights.w13_scale.shape).clone()
    scale[:, 0] = torch.tensor([127, 0, 64, 100])  # nothing too small
    weights = replace(weights, w13=weights.w13 & 0x88 | 0x52, w13_scale=scale)
    experts = ScaledMxfp4Experts(config, weight_key=kMxfp4Static, activation_key=kMxfp8Dynamic)
    converted = experts.convert(weights)
    relative = converted.quant_config.w1_scale
    assert relative is not None
    found = dequantize_weight(converted.w13, relative[..., :4].contiguous(), kMxfp4Static, parts=2, dtype=torch.float64)
    found *= converted.extra["w13_channel_scales"][:, :, None].double()
    exact = dequantize_weight(weights.w13, scale, kMxfp4Static, parts=2, dtype=torch.float64)
    assert torch.equal(found[:, 0], exact[:, 0])
    assert torch.equal(found[:, 1:, :64], exact[:, 1:, :64])
    assert not found[:, 1:, 64:].any()
    # nothing is copied where nothing is left out
    assert converted.w2 is weights.w2


def test_the_layout_of_scaled_codes_needs_no_values() -> None:
    """Kernels are compiled for GPUs that are elsewhere on weights without memory."""
    config = FusedMoEConfig(num_experts=2, top_k=1, hidden_size=128, intermediate_size=64)
    experts = ScaledMxfp4Experts(config, weight_key=kMxfp4Static, activation_key=kMxfp8Dynamic)
    assert meta_layer_weights(experts).w13.is_meta


@pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret) and not hasattr(triton.runtime.interpreter, "_e2m1_to_f32"),
    reason="this Triton's interpreter has no dot_scaled (that of 3.9 has)",
)
class TestScaledMxfp4(ConformanceTests):
    experts = ScaledMxfp4Experts
    interpreted_every = 6
