"""Triton, MXFP4 weights with 16-bit or quantised activations.

The portable backend: it reads the checkpoint's codes as they are and makes numbers of them in registers, by plain
Triton operations; scales are turned once, so that those of a step lie together.  Every key of the scheme, standard and
batched format.
``moe_core.gemm.portable.layer`` says what a call consists of, ``kernels/e2m1.py`` how exact its products are.
Quantised activations multiply as bfloat16 numbers, which hold e4m3 and e2m1 times a power of two; where tensor cores
multiply codes with their scales (sm_100 and its family, gfx950), MXFP8 ones stay codes.
"""

from __future__ import annotations

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
    WorkspaceSpec,
    cuda,
    hip,
    kMxfp4Static,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.experts import GroupedExperts
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.portable.kinds import ActivationKind
from moe_core.gemm.portable.rule import portable_plan
from moe_core.gemm.portable.words import as_words
from torch import Tensor

from moe_mxfp4.keys import ACTIVATIONS
from moe_mxfp4.scales import group_scales, has_scaled_units, step_scales

if TYPE_CHECKING:
    from moe_core.gemm.portable.layer import PackedMatrix


class TritonMxfp4Experts(GroupedExperts):
    """e2m1 codes that become numbers in registers, through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=80), hip("gfx942", "gfx950")),
        keys=((kMxfp4Static, None), *((kMxfp4Static, activation) for activation in ACTIVATIONS)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="quantised activations are multiplied as bfloat16 numbers; on sm_100 and gfx950 MXFP8 ones are not",
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("MXFP4 weights come with w13_scale and w2_scale")
        config, scales = self.config, group_scales if self.scaled else step_scales
        w13_scale, w13_factors = scales(weights.w13, weights.w13_scale, config.hidden_size)
        w2_scale, w2_factors = scales(weights.w2, weights.w2_scale, config.intermediate_size)
        inputs = {"w13_input_scale": weights.w13_input_scale, "w2_input_scale": weights.w2_input_scale}
        if self.kind is ActivationKind.EXPERT:
            for name, scale in inputs.items():
                if scale is None:
                    raise TensorError(f"{name} is missing, the activation key is {weights.activation_key}")
                inputs[name] = scale.float().contiguous()
        return KernelWeights(
            w13=weights.w13 if self.scaled else as_words(weights.w13),
            w2=weights.w2 if self.scaled else as_words(weights.w2),
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=w13_scale,
                w2_scale=w2_scale,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
                a1_scale=inputs["w13_input_scale"],
                a2_scale=inputs["w2_input_scale"],
            ),
            extra={"w13_factors": w13_factors, "w2_factors": w2_factors},
        )

    @cached_property
    def kind(self) -> ActivationKind:
        """What x and h are rounded to."""
        return ActivationKind.of(self.activation_key)

    @property
    def scaled(self) -> bool:
        """Whether tensor cores multiply codes with their scales."""
        return self.kind is ActivationKind.MXFP8 and has_scaled_units(self.device_info)

    @property
    def short_steps(self) -> bool:
        """Whether no tensor core multiplies, so that a step of the k loop has 32 columns."""
        return self.config.dtype is torch.float32 and self.kind is ActivationKind.PLAIN

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        config = self.config
        return portable_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            dtype_bytes=4 if self.short_steps else 2,
            group_size=-1,
            scaled_numbers=True,
            scaled_steps=self.kind is ActivationKind.BLOCK,
            capability=self.device_info.capability,
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.gemm.portable.layer import portable_workspaces

        config = self.config
        return portable_workspaces(
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            kind=self.kind,
            weight_on_input=self.weight_on_input,
            scaled=self.scaled,
            batched=self.batched,
        )

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_core.gemm.portable.layer import STEP, portable_fused_moe

        from moe_mxfp4.kernels.matrix import SHORT_STEP, e2m1_matrix, scaled_matrix

        quant = weights.quant_config
        step = SHORT_STEP if self.short_steps and x.is_cuda else STEP

        def matrix(name: str, codes: Tensor, columns: int, input_scale: Tensor | None) -> PackedMatrix:
            given = (codes, columns, call.pop(f"{name}_scale"), weights.extra[f"{name}_factors"])
            bias = call.pop(f"{name}_bias")
            if self.scaled:
                return scaled_matrix(*given, bias=bias)
            return e2m1_matrix(*given, bias=bias, input_scale=input_scale, step=step)

        w13 = matrix("w13", weights.w13, self.config.hidden_size, quant.a1_scale)
        w2 = matrix("w2", weights.w2, self.config.intermediate_size, quant.a2_scale)
        portable_fused_moe(x, w13, w2, kind=self.kind, **call)
