"""Marlin-class kernels: repacked e2m1 weights with 16-bit or quantized activations.

Weight codes are stored in tensor-core fragment order and dequantized in registers, so no FP4 hardware is needed (sm_80
and newer): see ``moe_core.kernels.gemm.marlin``. Quantized activations are dequantized immediately and multiplied with
the weights in bfloat16 (`moe_core.kernels.gemm.as_stored.qdq`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    MoEWeights,
    cuda,
    kMxfp4Static,
)
from moe_core.api.experts import MarlinExperts
from torch import Tensor

from moe_mxfp4.keys import ACTIVATIONS

if TYPE_CHECKING:
    from moe_core.api.kernels import Converted, GemvFunctions, MarlinMatrix, WordFunctions

_DTYPES = frozenset({torch.bfloat16, torch.float16})


class _MarlinMxfp4Experts(MarlinExperts):
    """Implementation for both activation formats."""

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        from moe_mxfp4.marlin_layout import convert_e2m1

        config = self.config
        if name == "w2":
            return convert_e2m1(weights.w2, scale, config.intermediate_size)
        return convert_e2m1(weights.w13, scale, config.hidden_size, gated=config.is_gated)

    @property
    def functions(self) -> Any:
        from moe_mxfp4.kernels.marlin_e2m1 import e2m1_functions

        return e2m1_functions

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions:
        from moe_mxfp4.kernels.marlin_e2m1 import e2m1_gemv

        return e2m1_gemv()

    def word_functions(self, matrix: MarlinMatrix) -> WordFunctions:
        from moe_mxfp4.kernels.marlin_e2m1 import e2m1_words

        return e2m1_words()


class MarlinMxfp4Experts(_MarlinMxfp4Experts):
    """Marlin-class weight-only MXFP4, standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kMxfp4Static, None),),
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )


class BatchedMarlinMxfp4Experts(_MarlinMxfp4Experts):
    """Marlin-class weight-only MXFP4, batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kMxfp4Static, None),),
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )


class MarlinMxfp4QdqExperts(_MarlinMxfp4Experts):
    """Marlin-class MXFP4 with quantized activations, both formats.

    Not for sm_100, whose tensor cores multiply MXFP8 activations with e2m1 weights directly.
    """

    claims = Claims(
        devices=(cuda(min=80, max=99), cuda(min=120)),
        keys=tuple((kMxfp4Static, activation) for activation in ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)",),
        notes="products in bfloat16: MXFP8 and MXFP4 values exactly, e4m3 codes times other scales rounded",
    )
