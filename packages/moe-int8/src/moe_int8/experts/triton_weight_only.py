"""Triton, int8 weights with one scale per output channel, 16-bit activations (W8A16): standard and batched format.

Weights are widened in registers (sm_80 and newer); their bytes change places within 32 columns when they are converted.
``kernels/wide_moe.py`` says what a call consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    KernelWeights,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.plan import TilePlan
from moe_core.quant_key import kInt8StaticChannelSym
from torch import Tensor

from moe_int8.kernels.wide_rule import wide_plan
from moe_int8.layout import order_words


class TritonInt8WeightOnlyExperts(FusedMoEExpertsModular):
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

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Launch parameters for so many tokens, or rows T_max of each expert's buffer."""
        config = self.config
        plan = wide_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            dtype_bytes=config.dtype.itemsize,
            gated=config.is_gated,
            capability=self.device_info.capability,
        )
        if self.batched:
            plan = plan.unsplit()
        # Triton's interpreter knows no dependent launches
        return plan if on_gpu else replace(plan, pdl=False)

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

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        weights: KernelWeights,
        *,
        topk_weights: Tensor,
        topk_ids: Tensor,
        workspace: Mapping[str, Tensor],
        expert_map: Tensor | None = None,
        hidden_states_scale: Tensor | None = None,
        expert_tokens: ExpertTokensMetadata | None = None,
    ) -> None:
        from moe_core.gemm.launch import Activation

        from moe_int8.kernels.wide_moe import wide_fused_moe

        config, quant = self.config, weights.quant_config
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of int8 weights holds w1_scale and w2_scale")
        if self.batched and expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        wide_fused_moe(
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            out=output,
            workspace=workspace,
            plan=self.plan(hidden_states.shape[-2], hidden_states.is_cuda),
            activation=Activation.of(config),
            topk_weights=None if self.batched else topk_weights,
            topk_ids=None if self.batched else topk_ids,
            expert_num_tokens=expert_tokens.expert_num_tokens if self.batched and expert_tokens is not None else None,
            w13_bias=quant.w1_bias,
            w2_bias=quant.w2_bias,
            expert_map=expert_map,
            apply_router_weight_on_input=config.apply_router_weight_on_input and not self.batched,
        )
