"""Marlin-class kernels: repacked e4m3 weights with 16-bit, float32 or FP8 activations.

Weight codes are stored in tensor-core fragment order and dequantized in registers, so no FP8 hardware is needed (sm_80
and newer): see ``moe_core.kernels.gemm.marlin``. Quantized activations are dequantized immediately and multiplied with
the weights in bfloat16 (`moe_core.kernels.gemm.as_stored.qdq`), for GPUs without FP8 tensor cores.
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
    GroupShape,
    KeyPattern,
    MoEWeights,
    cuda,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Static,
)
from moe_core.api.experts import MarlinExperts
from torch import Tensor

if TYPE_CHECKING:
    from moe_core.api.kernels import Converted, GemvFunctions, MarlinMatrix

_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128), GroupShape(64, 64), GroupShape(128, 64))
_BLOCK_SCALES = (torch.float32, torch.uint8)
_KEYS = (
    (kFp8StaticTensorSym, None),
    (kFp8StaticChannelSym, None),
    (KeyPattern(kFp8Static128BlockSym, _BLOCKS, _BLOCK_SCALES), None),
    (kMxfp8Static, None),
)
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


class MarlinE4M3Experts(MarlinExperts):
    """Implementation for both activation formats; subclasses add claims."""

    def converted(self, name: str, weights: MoEWeights, scale: Tensor) -> Converted:
        from moe_fp8.marlin_layout import convert_e4m3

        if name == "w2":
            return convert_e4m3(weights.w2, scale, self.quantized_key)
        return convert_e4m3(weights.w13, scale, self.quantized_key, gated=self.config.is_gated)

    @property
    def functions(self) -> Any:
        from moe_fp8.kernels.marlin_e4m3 import e4m3_functions

        return e4m3_functions

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions | None:
        from moe_fp8.kernels.marlin_e4m3 import e4m3_gemv

        return e4m3_gemv(matrix)


class MarlinFp8Experts(MarlinE4M3Experts):
    """Marlin-class weight-only FP8, standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        rounds_scales=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="float32 layers multiply outside the tensor cores",
    )


class BatchedMarlinFp8Experts(MarlinE4M3Experts):
    """Marlin-class weight-only FP8, batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        batch_invariant=True,
        rounds_scales=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="float32 layers multiply outside the tensor cores",
    )


class MarlinFp8QdqExperts(MarlinE4M3Experts):
    """FP8 activations (token, group or static tensor scales) on GPUs without FP8 tensor cores."""

    claims = Claims(
        devices=(cuda(min=80, max=88),),
        keys=(
            *(
                (weight, activation)
                for weight in (kFp8StaticTensorSym, kFp8StaticChannelSym)
                for activation in (kFp8DynamicTokenSym, kFp8StaticTensorSym)
            ),
            (KeyPattern(kFp8Static128BlockSym, _BLOCKS[:2], _BLOCK_SCALES), kFp8Dynamic128Sym),
            (KeyPattern(kFp8Static128BlockSym, _BLOCKS[2:], _BLOCK_SCALES), kFp8Dynamic64Sym),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        rounds_scales=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        notes="products in bfloat16, to which a code times its scale is rounded",
    )
