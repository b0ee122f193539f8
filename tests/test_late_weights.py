"""Kernels wait for their weights, however late they come: half of their pages are in the host's memory.

What is read from there takes many times as long as what is read from the GPU's own memory, so that requests are
answered in another order than they were made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core.parallel.prepare_finalize.by_name import default_prepare_finalize
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.testing.data import make_inputs, make_weights
from moe_core_managed import managed_copy
from moe_fp8.experts.marlin import MarlinFp8Experts
from moe_fp8.experts.triton import TritonFp8BlockExperts
from moe_fp8.experts.triton_scaled_mm import TritonFp8Experts
from moe_int8.experts.triton import TritonInt8Experts
from moe_mxfp4.experts.marlin import MarlinMxfp4Experts
from moe_wna16.experts.marlin import MarlinWNA16Experts

KINDS = {
    "fp8 blocks": (TritonFp8BlockExperts, mc.kFp8Static128BlockSym, mc.kFp8Dynamic128Sym),
    "fp8 channel": (TritonFp8Experts, mc.kFp8StaticChannelSym, mc.kFp8DynamicTokenSym),
    "int8": (TritonInt8Experts, mc.kInt8StaticChannelSym, mc.kInt8DynamicTokenSym),
    "int4": (MarlinWNA16Experts, mc.kInt4Static, None),
    "int8 words": (MarlinWNA16Experts, mc.kInt8Static, None),
    "mxfp4": (MarlinMxfp4Experts, mc.kMxfp4Static, None),
    "e4m3 words": (MarlinFp8Experts, mc.kFp8StaticChannelSym, None),
}
PAGE = 1 << 16
#: vectors, tiles of every height, short ones and whole ones
TOKENS = (1, 4, 8, 20, 60, 150, 500, 1100)
CONFIG = mc.FusedMoEConfig(num_experts=8, top_k=2, hidden_size=2048, intermediate_size=1024)


def late(values: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy of which every second page, by chance, is in the host's memory."""
    pages = torch.rand(values.nbytes // PAGE, generator=torch.Generator().manual_seed(seed))
    return managed_copy(values, pages < 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind: str, device: torch.device) -> None:
    experts: Any
    experts, weight_key, activation_key = KINDS[kind]
    layers = [experts(CONFIG, weight_key=weight_key, activation_key=activation_key) for _ in range(3)]
    weights = layers[0].convert(make_weights(CONFIG, weight_key, activation_key, seed=0).to(device))
    each = [weights]
    for seed in (1, 2):
        each.append(replace(weights, w13=late(weights.w13, seed), w2=late(weights.w2, seed + 10)))
    prepare_finalize = default_prepare_finalize(CONFIG)
    kernels = [FusedMoEKernel(*made, prepare_finalize) for made in zip(layers, each, strict=True)]
    for tokens in TOKENS:
        inputs = make_inputs(CONFIG, tokens, seed=tokens).to(device)
        routed = {"topk_weights": inputs.topk_weights, "topk_ids": inputs.topk_ids}
        first, *others = (kernel.apply(inputs.x, **routed) for kernel in kernels)
        assert bool(first.isfinite().all())
        assert bool(first.any())
        for other in others:
            assert torch.equal(first, other)
