"""Marlin-class kernels: repacked int4 weights with int8 activations (W4A8), both formats.

Activations are quantized and dequantized per token, and multiplied with the codes in bfloat16: see
``moe_core.kernels.gemm.marlin`` and ``moe_core.kernels.gemm.as_stored.qdq``. Zero points are not supported: for rows
whose values have one sign, rounding to bfloat16 would lose nearly as much as int8 does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    MoEWeights,
    cuda,
    kInt4W4A8StaticChannelSym,
    kInt8DynamicTokenSym,
)
from moe_core.api.experts import MarlinIntegerExperts
from torch import Tensor

from moe_int8.experts.triton_w4a8 import GROUPS
from moe_int8.layout import pack_unsigned_int4

if TYPE_CHECKING:
    from moe_core.api.kernels import Converted


class MarlinW4A8Int8Experts(MarlinIntegerExperts):
    """W4A8 with int4 weights dequantized to bfloat16 in registers."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kInt4W4A8StaticChannelSym, kInt8DynamicTokenSym), (GROUPS, kInt8DynamicTokenSym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        rounds_scales=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)",),
        notes="products in bfloat16, to which a code times its scale is rounded",
    )

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        if name == "w13":
            weights = replace(weights, w13=pack_unsigned_int4(weights.w13))
        else:
            weights = replace(weights, w2=pack_unsigned_int4(weights.w2))
        return super().converted(name, weights, scale)
