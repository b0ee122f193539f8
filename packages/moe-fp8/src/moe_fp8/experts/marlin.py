"""Marlin-class kernels: e4m3 weights, repacked at load, with 16-bit (or float32) activations.

Codes are put into the order in which the registers of the tensor cores hold them, and widened there, so that no FP8
hardware is needed (sm_80 and newer): see ``moe_core.gemm.marlin``.
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
    KernelWeights,
    KeyPattern,
    MoEWeights,
    TensorError,
    cuda,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Static,
    make_quant_config,
)
from moe_core.experts_api import MarlinExperts
from torch import Tensor

if TYPE_CHECKING:
    from moe_core.kernel_api import GemvFunctions, MarlinMatrix

_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128), GroupShape(64, 64), GroupShape(128, 64))
_KEYS = (
    (kFp8StaticTensorSym, None),
    (kFp8StaticChannelSym, None),
    (KeyPattern(kFp8Static128BlockSym, _BLOCKS, (torch.float32, torch.uint8)), None),
    (kMxfp8Static, None),
)
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})


class MarlinE4M3Experts(MarlinExperts):
    """The computation, in both formats; subclasses add claims."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        from moe_fp8.kernels.marlin_convert import convert_e4m3

        key = weights.weight_key
        if key is None or weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("FP8 weights come with w13_scale and w2_scale")
        w13 = convert_e4m3(weights.w13, weights.w13_scale, key, gated=self.config.is_gated)
        w2 = convert_e4m3(weights.w2, weights.w2_scale, key)
        channel_scales = {"w13_channel_scales": w13.channel_scales, "w2_channel_scales": w2.channel_scales}
        return KernelWeights(
            w13=w13.words,
            w2=w2.words,
            quant_config=make_quant_config(
                weight_key=key,
                activation_key=weights.activation_key,
                w1_scale=w13.scales,
                w2_scale=w2.scales,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra={name: tensor for name, tensor in channel_scales.items() if tensor is not None},
        )

    @property
    def functions(self) -> Any:
        from moe_fp8.kernels.marlin_e4m3 import e4m3_functions

        return e4m3_functions

    def gemv_functions(self, matrix: MarlinMatrix) -> GemvFunctions | None:
        from moe_fp8.kernels.marlin_e4m3 import e4m3_gemv

        return e4m3_gemv(matrix)

    def matrix(self, name: str, weights: KernelWeights, scales: Tensor, bias: Tensor | None) -> MarlinMatrix:
        from moe_core.kernel_api import MarlinMatrix

        key, config = self.weight_key, self.config
        if key is None:
            raise TensorError("16-bit weights are not read here")
        first, shape = name == "w13", key.group_shape
        return MarlinMatrix(
            weights.w13 if first else weights.w2,
            8,
            config.intermediate_size if first else config.hidden_size,
            config.hidden_size if first else config.intermediate_size,
            -1 if shape.is_per_tensor or shape.is_per_row else shape.col,
            scales,
            channel_scales=weights.extra.get(f"{name}_channel_scales"),
            bias=bias,
            interleaved=first and config.is_gated,
        )


class MarlinFp8Experts(MarlinE4M3Experts):
    """Standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="float32 layers multiply outside the tensor cores",
    )


class BatchedMarlinFp8Experts(MarlinE4M3Experts):
    """Batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=_KEYS,
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="float32 layers multiply outside the tensor cores",
    )
