"""Triton, int4 weights with channel or group scales, int8 activations (W4A8), both formats.

Each byte holds two codes, half the checkpoint's size. They are unpacked in registers (sm_80 and newer), as
``kernels/int4.py`` describes. Activations have one scale per token and, with the asymmetric key, a zero point.

``moe_core.kernels.gemm.fused.scaled_mm`` describes the steps of a call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
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
    GroupShape,
    KernelWeights,
    KeyPattern,
    MoEWeights,
    QuantKey,
    TensorError,
    cuda,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
)
from moe_core.api.experts import LayerProblem
from torch import Tensor

from moe_int8.experts.scaled_mm import Int8ScaledMMExperts
from moe_int8.layout import group_scales, int4_half, pack_int4, row_sums, scaled_row_sums
from moe_int8.sums import sum_reasons

if TYPE_CHECKING:
    from moe_core.api.kernels import ScaledMMFunctions

GROUPS = KeyPattern(
    kInt4W4A8StaticGroup128Sym,
    (GroupShape(1, 128), GroupShape(1, 64), GroupShape(1, 32)),
    (torch.bfloat16, torch.float32),
)
_ACTIVATIONS = (kInt8DynamicTokenSym, kInt8DynamicTokenAsym)


class TritonW4A8Int8Experts(Int8ScaledMMExperts):
    """W4A8 with int4 weights unpacked to int8 in registers."""

    #: LoRA deltas are added next to two accumulators; the largest spill is 384 on sm90
    accepted_spills = (384, 384)

    claims = Claims(
        devices=(cuda(min=80),),
        keys=tuple((weight, key) for weight in (kInt4W4A8StaticChannelSym, GROUPS) for key in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        whole_groups=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
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
        w13_scale, w2_scale = weights.weight_scales
        half = int4_half(self.group_size)
        extra: dict[str, Tensor] = {}
        if self.zero_points and self.group_size == -1:
            extra = {"w13_sums": row_sums(weights.w13) * 16, "w2_sums": row_sums(weights.w2) * 16}
        elif self.zero_points:
            extra = {
                "w13_sums": scaled_row_sums(weights.w13, w13_scale),
                "w2_sums": scaled_row_sums(weights.w2, w2_scale),
            }
        return KernelWeights(
            w13=pack_int4(weights.w13, half),
            w2=pack_int4(weights.w2, half),
            quant_config=weights.quant_config(
                w1_scale=self._kernel_scale(w13_scale, half), w2_scale=self._kernel_scale(w2_scale, half)
            ),
            extra=extra,
        )

    def _kernel_scale(self, scale: Tensor, half: int) -> Tensor:
        # codes are 16 times as large in the kernel
        return scale / 16 if self.group_size == -1 else group_scales(scale, half, self.group_size)

    @property
    def group_size(self) -> int:
        """Columns that share a scale; -1 for one scale per row."""
        if self.weight_key is None:
            raise TensorError("weight_key is None (16-bit weights), expected a quantized weight key")
        return self.weight_key.group_size

    @property
    def functions(self) -> ScaledMMFunctions:
        from moe_int8.kernels.int4 import functions_of

        return functions_of(self.group_size, zero_points=self.zero_points)

    @cached_property
    def problem(self) -> LayerProblem:
        return replace(super().problem, group_size=self.group_size)
