"""Triton, MXFP4 weights with 16-bit or quantized activations, both formats.

Weights keep the checkpoint's layout and are dequantized in registers by plain Triton operations. Scales are transposed
once, so that those of a step are contiguous. Every key of the scheme is supported.

``moe_core.kernels.gemm.fused.layer`` describes the steps of a call, ``kernels/e2m1.py`` the exactness of its products.
Quantized activations are multiplied in bfloat16, which represents e4m3 and e2m1 times a power of two. On GPUs with
block-scaled MMA (sm_100 family, gfx950), MXFP8 activations stay codes.
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
    FusedMoEActivationFormat,
    KernelWeights,
    MoEWeights,
    cuda,
    hip,
    kFp8Dynamic128Sym,
    kMxfp4Static,
    kMxfp8Dynamic,
)
from moe_core.api.experts import GroupedExperts, LayerProblem, as_words
from torch import Tensor

from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.scales import LARGEST_SCALED, group_scales, has_scaled_units, step_scales, without_small_groups

if TYPE_CHECKING:
    from moe_core.api.kernels import ActivationScheme, GemmWeight


class TritonMxfp4Experts(GroupedExperts):
    """MXFP4 dequantized in registers, through the grouped GEMM of ``moe_core.kernels.gemm``."""

    family = "as_stored"
    #: each step's scales next to the partial sum; masks of odd sizes
    accepted_spills = (192, 320)

    claims = Claims(
        devices=(cuda(min=80), hip("gfx942", "gfx950")),
        keys=((kMxfp4Static, None), *((kMxfp4Static, activation) for activation in ACTIVATIONS)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
        notes="quantized activations are multiplied as bfloat16 numbers; on sm_100 and gfx950 MXFP8 ones are not",
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        first, second = weights.weight_scales
        config, scales = self.config, group_scales if self.scaled else step_scales
        w13_scale, w13_channel_scales = scales(weights.w13, first, config.hidden_size)
        w2_scale, w2_channel_scales = scales(weights.w2, second, config.intermediate_size)
        return KernelWeights(
            w13=self._codes(weights.w13, first, config.hidden_size),
            w2=self._codes(weights.w2, second, config.intermediate_size),
            quant_config=weights.quant_config(w1_scale=w13_scale, w2_scale=w2_scale),
            extra={"w13_channel_scales": w13_channel_scales, "w2_channel_scales": w2_channel_scales},
        )

    def _codes(self, codes: Tensor, scale: Tensor, columns: int) -> Tensor:
        """Return the codes in the kernel's form."""
        return without_small_groups(codes, scale, columns, LARGEST_SCALED) if self.scaled else as_words(codes)

    @property
    def scaled(self) -> bool:
        """Whether the tensor cores multiply codes with their scales."""
        return self.activation_key == kMxfp8Dynamic and has_scaled_units(self.device_info)

    @property
    def short_steps(self) -> bool:
        """Whether no tensor core is used, so that a mainloop step has 32 columns."""
        return self.config.dtype is torch.float32 and self.activation_key is None

    @cached_property
    def problem(self) -> LayerProblem:
        group_size = 128 if self.activation_key == kFp8Dynamic128Sym else -1
        return replace(super().problem, dtype_bytes=4 if self.short_steps else 2, group_size=group_size)

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_core.api.kernels import as_stored_scheme

        quant = None if weights is None else weights.quant_config
        static = (None, None) if quant is None else (quant.a1_scale, quant.a2_scale)
        return as_stored_scheme(self.activation_key, 4, self.config.dtype, scaled=self.scaled, static=static)

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        from moe_core.api.kernels import SHORT_STEP, STEP, packed_weight

        from moe_mxfp4.kernels.e2m1 import e2m1_functions
        from moe_mxfp4.kernels.scaled import SCALED

        scales, bias = self.scales(name, weights)
        step = SHORT_STEP if self.short_steps and weights.device.type != "cpu" else STEP
        return packed_weight(
            weights.w13 if name == "w13" else weights.w2,
            4,
            *self.sizes(name),
            scales.transpose(1, 2) if self.scaled else scales,
            SCALED if self.scaled else e2m1_functions(self.activation_key, step),
            others=weights.extra[f"{name}_channel_scales"],
            bias=bias,
            step=step,
        )
