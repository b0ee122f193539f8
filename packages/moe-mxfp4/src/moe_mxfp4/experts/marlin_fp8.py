"""Marlin-class kernels: repacked e2m1 weights with e4m3 activations (sm_89+), both formats.

Weights are converted to e4m3 in registers and multiplied on FP8 tensor cores, at twice the 16-bit rate. Activations
have one scale per token, computed at run time, or one per expert (static).

``moe_core.kernels.gemm.fused.scaled_mm`` describes the steps of a call, ``kernels/e4m3.py`` the conversion of weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
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
    cuda,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp4Static,
)
from moe_core.api.experts import LayerProblem, ScaledMMExperts

from moe_mxfp4.scales import LARGEST_E4M3, without_small_groups

if TYPE_CHECKING:
    from moe_core.api.kernels import ScaledMMFunctions

_ACTIVATIONS = (kFp8DynamicTokenSym, kFp8StaticTensorSym)


class MarlinMxfp4Fp8Experts(ScaledMMExperts):
    """MXFP4 weights converted to e4m3 in registers, with FP8 activations."""

    claims = Claims(
        devices=(cuda(min=89),),
        keys=tuple((kMxfp4Static, activation) for activation in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="of a row's groups those whose scale is 2^-12 of the largest and less count as zeros",
    )

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        if weights.w13_scale is None or weights.w2_scale is None:
            return weights
        w13 = without_small_groups(weights.w13, weights.w13_scale, self.config.hidden_size, LARGEST_E4M3)
        w2 = without_small_groups(weights.w2, weights.w2_scale, self.config.intermediate_size, LARGEST_E4M3)
        return weights if w13 is weights.w13 and w2 is weights.w2 else replace(weights, w13=w13, w2=w2)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        from moe_mxfp4.marlin_layout import convert_to_e4m3

        w13_scale, w2_scale = weights.weight_scales
        w13 = convert_to_e4m3(weights.w13, w13_scale, self.config.hidden_size)
        w2 = convert_to_e4m3(weights.w2, w2_scale, self.config.intermediate_size)
        return KernelWeights(
            w13=w13.words,
            w2=w2.words,
            quant_config=weights.quant_config(w1_scale=w13.scales, w2_scale=w2.scales),
            extra={"w13_powers": w13.powers, "w2_powers": w2.powers},
        )

    @property
    def functions(self) -> ScaledMMFunctions:
        from moe_mxfp4.kernels.e4m3 import E2M1

        return E2M1

    def extra_arguments(self, name: str, weights: KernelWeights) -> tuple[Any, ...]:
        powers = weights.extra[f"{name}_powers"]
        return powers, powers.stride(0), powers.stride(1)

    @cached_property
    def problem(self) -> LayerProblem:
        return replace(super().problem, quantizes_h=self.granularity == "static")
