"""Triton, per-channel int8 weights, int8 activations (sm_80+, gfx942, gfx950), both formats.

sm_75 has int8 tensor cores but is not supported: Triton 3.6 to 3.9 cannot compile int8 MMAs for it. On sm_90
weights become block-major (`GroupedExperts.block_major`), elsewhere they keep the checkpoint's layout. Activations have
one scale per token, one for all tokens (both computed at run time) or one per expert (static). Zero points are per
token or per expert; they need the row sums of the weights.

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
    DeviceInfo,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    KernelWeights,
    MoEWeights,
    QuantKey,
    TensorError,
    cuda,
    hip,
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from torch import Tensor

from moe_int8.experts.scaled_mm import Int8ScaledMMExperts
from moe_int8.layout import row_sums, scale_and_zero
from moe_int8.sums import sum_reasons

if TYPE_CHECKING:
    from moe_core.api.kernels import ScaledMMFunctions

_ACTIVATIONS = (
    kInt8DynamicTokenSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTensorSym,
    kInt8StaticTensorSym,
    kInt8StaticTensorAsym,
)


class TritonInt8Experts(Int8ScaledMMExperts):
    """Per-channel INT8 through the grouped GEMM of ``moe_core.kernels.gemm``."""

    #: two int32 accumulators next to scales, zero points and NaN flags (largest: 328, Triton 3.6, sm90, ungated)
    accepted_spills = (424, 424)
    #: spills of both halves, with zero points (Triton 3.6, sm90)
    accepted_lora_spills = 736

    claims = Claims(
        devices=(cuda(min=80), hip("gfx942", "gfx950")),
        keys=tuple((kInt8StaticChannelSym, activation) for activation in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        takes_quantized=True,
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        reasons = super().extra_reasons(config, weight_key, activation_key, device)
        return [*reasons, *sum_reasons(config, weight_key, activation_key)]

    def convert(self, weights: MoEWeights) -> KernelWeights:
        extra: dict[str, Tensor] = {}
        if self.zero_points:
            extra = {"w13_sums": row_sums(weights.w13), "w2_sums": row_sums(weights.w2)}
        if self.granularity == "static":
            for name in ("w13", "w2"):
                scale, zero = getattr(weights, f"{name}_input_scale"), getattr(weights, f"{name}_input_zero_point")
                if scale is None or (zero is None) == self.zero_points:
                    raise TensorError(
                        f"{name}: static scales are not supported with the activation key {self.activation_key}"
                    )
                if zero is not None:
                    extra[f"{name}_input"] = scale_and_zero(scale, zero)
        return KernelWeights(
            w13=self.block_major(weights, "w13"),
            w2=self.block_major(weights, "w2"),
            quant_config=weights.quant_config(),
            extra=extra,
        )

    @property
    def functions(self) -> ScaledMMFunctions:
        from moe_int8.kernels.scaled_mm import INT8, INT8_ZERO

        return INT8_ZERO if self.zero_points else INT8

    def static_scales(self, weights: KernelWeights) -> tuple[Tensor | None, Tensor | None]:
        if self.zero_points:
            return weights.extra.get("w13_input"), weights.extra.get("w2_input")
        return super().static_scales(weights)
