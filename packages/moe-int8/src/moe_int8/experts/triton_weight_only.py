"""Triton, per-channel int8 weights, 16-bit activations (W8A16), both formats.

Conversion stores weights in tensor-core fragment order; they are dequantized in registers (sm_80 and newer): see
``moe_core.kernels.gemm.marlin``.
"""

from __future__ import annotations

import torch
from moe_core import GATED, NON_GATED, TRITON, Claims, FusedMoEActivationFormat, cuda, kInt8StaticChannelSym
from moe_core.api.experts import MarlinIntegerExperts


class TritonInt8WeightOnlyExperts(MarlinIntegerExperts):
    """W8A16 with int8 weights dequantized to the activations' dtype in registers."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kInt8StaticChannelSym, None),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="float32 layers multiply outside the tensor cores",
    )
