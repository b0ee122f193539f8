"""Marlin-class kernels: e2m1 weights, repacked at load, with 16-bit activations.

Codes are put into the order in which the registers of the tensor cores hold them, and widened there, so that no FP4
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
    KernelWeights,
    MoEWeights,
    TensorError,
    cuda,
    kMxfp4Static,
    make_quant_config,
)
from moe_core.experts_api import MarlinExperts
from torch import Tensor

from moe_mxfp4.groups import GROUP

if TYPE_CHECKING:
    from moe_core.kernel_api import MarlinMatrix

_DTYPES = frozenset({torch.bfloat16, torch.float16})


class _MarlinMxfp4Experts(MarlinExperts):
    """The computation, in both formats."""

    def convert(self, weights: MoEWeights) -> KernelWeights:
        from moe_mxfp4.kernels.marlin_convert import convert_e2m1

        if weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("MXFP4 weights come with w13_scale and w2_scale")
        config = self.config
        w13 = convert_e2m1(weights.w13, weights.w13_scale, config.hidden_size, gated=config.is_gated)
        w2 = convert_e2m1(weights.w2, weights.w2_scale, config.intermediate_size)
        channel_scales = {"w13_channel_scales": w13.channel_scales, "w2_channel_scales": w2.channel_scales}
        return KernelWeights(
            w13=w13.words,
            w2=w2.words,
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=None,
                w1_scale=w13.scales,
                w2_scale=w2.scales,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra={name: tensor for name, tensor in channel_scales.items() if tensor is not None},
        )

    @property
    def functions(self) -> Any:
        from moe_mxfp4.kernels.marlin_e2m1 import e2m1_functions

        return e2m1_functions

    def matrix(self, name: str, weights: KernelWeights, scales: Tensor, bias: Tensor | None) -> MarlinMatrix:
        from moe_core.kernel_api import MarlinMatrix

        config, first = self.config, name == "w13"
        return MarlinMatrix(
            weights.w13 if first else weights.w2,
            4,
            config.intermediate_size if first else config.hidden_size,
            config.hidden_size if first else config.intermediate_size,
            GROUP,
            scales,
            channel_scales=weights.extra[f"{name}_channel_scales"],
            bias=bias,
            interleaved=first and config.is_gated,
        )


class MarlinMxfp4Experts(_MarlinMxfp4Experts):
    """Standard format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kMxfp4Static, None),),
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )


class BatchedMarlinMxfp4Experts(_MarlinMxfp4Experts):
    """Batched format."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kMxfp4Static, None),),
        activations=GATED | NON_GATED,
        dtypes=_DTYPES,
        bias=True,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )
