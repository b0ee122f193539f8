"""Triton, e4m3 weights and activations with tensor, channel or token scales, both formats.

Runs on sm_89 and newer, gfx942 and gfx950. On sm_90 weights become block-major (`GroupedExperts.block_major`),
elsewhere they keep the checkpoint's layout. Gate and up keep separate scales. Activations have one scale per token, one
for all tokens (both computed at run time) or one per expert (static).

``moe_core.kernels.gemm.fused.scaled_mm`` describes the steps of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    KernelWeights,
    MoEWeights,
    cuda,
    hip,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from moe_core.api.experts import ScaledMMExperts

if TYPE_CHECKING:
    from moe_core.api.kernels import ScaledMMFunctions

_WEIGHTS = (kFp8StaticTensorSym, kFp8StaticChannelSym)
_ACTIVATIONS = (kFp8DynamicTokenSym, kFp8DynamicTensorSym, kFp8StaticTensorSym)


class TritonFp8Experts(ScaledMMExperts):
    """Per-tensor or per-channel FP8 through the grouped GEMM of ``moe_core.kernels.gemm``."""

    #: LoRA deltas are added next to two accumulators (largest spill: 624 on sm90), for rows that 16-byte copies cannot
    #: address
    accepted_spills = (640, 640)

    claims = Claims(
        devices=(cuda(min=89), hip("gfx942", "gfx950")),
        keys=tuple((weight, activation) for weight in _WEIGHTS for activation in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        lora=True,
        requires=(TRITON,),
        takes_quantized=True,
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        return KernelWeights(
            w13=self.block_major(weights, "w13"),
            w2=self.block_major(weights, "w2"),
            quant_config=weights.quant_config(),
        )

    @property
    def functions(self) -> ScaledMMFunctions:
        from moe_core.api.kernels import E4M3

        return E4M3
