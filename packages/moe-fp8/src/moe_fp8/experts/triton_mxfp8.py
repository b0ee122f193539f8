"""Triton, MXFP8 weights and activations (1 x 32, e8m0), without block-scaled MMA.

An e4m3 number times a power of two is representable in bfloat16, so bfloat16 tensor cores multiply MXFP8 operands
exactly. x and h are rounded to MXFP8 and stored as bfloat16; weights are scaled in registers (see
`moe_fp8.experts.marlin`).
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
    cuda,
    kMxfp8Dynamic,
    kMxfp8DynamicDown,
    kMxfp8DynamicEven,
    kMxfp8Static,
)

from moe_fp8.experts.marlin import MarlinE4M3Experts

if TYPE_CHECKING:
    from moe_core import KernelWeights
    from moe_core.api.kernels import ActivationScheme


class TritonMxfp8Experts(MarlinE4M3Experts):
    """Triton backend for MXFP8 weights and activations."""

    #: The largest spill: 488 on sm100, in an ungated epilogue that quantizes 256 columns.
    accepted_spills = (496, 640)

    claims = Claims(
        devices=(cuda(min=80),),
        keys=tuple((kMxfp8Static, key) for key in (kMxfp8Dynamic, kMxfp8DynamicEven, kMxfp8DynamicDown)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="products in bfloat16, which holds MXFP8 values exactly",
    )

    @property
    def takes_vectors(self) -> bool:
        # x is quantized in the sorting kernel, h in the epilogue that produces it
        return False

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_core.api.kernels import as_stored_scheme

        return as_stored_scheme(self.activation_key, None, torch.bfloat16)
