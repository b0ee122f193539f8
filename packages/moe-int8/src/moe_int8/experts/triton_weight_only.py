"""Triton, int8 weights with one scale per output channel, 16-bit activations (W8A16): standard and batched format.

Weights are widened in registers (sm_80 and newer); their bytes change places within 32 columns when they are converted.
``kernels/wide_moe.py`` says what a call consists of.
"""

from __future__ import annotations

from typing import Any

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
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.experts import GroupedExperts
from moe_core.gemm.plan import TilePlan
from moe_core.quant_key import kInt8StaticChannelSym
from torch import Tensor

from moe_int8.kernels.wide_rule import wide_plan
from moe_int8.layout import order_words


class TritonInt8WeightOnlyExperts(GroupedExperts):
    """INT8 weights that become 16-bit numbers in registers."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=((kInt8StaticChannelSym, None),),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("int8 weights come with w13_scale and w2_scale")
        return KernelWeights(
            w13=order_words(weights.w13),
            w2=order_words(weights.w2),
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=None,
                w1_scale=weights.w13_scale,
                w2_scale=weights.w2_scale,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
        )

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        config = self.config
        return wide_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            dtype_bytes=config.dtype.itemsize,
            gated=config.is_gated,
            capability=self.device_info.capability,
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_int8.kernels.wide_moe import wide_workspaces

        config = self.config
        return wide_workspaces(
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            batched=self.batched,
        )

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_int8.kernels.wide_moe import wide_fused_moe

        wide_fused_moe(x, weights.w13, weights.w2, **call)
