"""Triton, e4m3 weights with one scale per tensor or output channel, e4m3 activations (sm_89 and newer).

Weights stay as the checkpoint has them; gate and up keep scales of their own.  Activations have one scale per token,
one for all (both found at run time) or one per expert (static).  Standard and batched format.
``kernels/rows_moe.py`` says what a call consists of.
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
    LoRA,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading, tile_plan
from moe_core.quant_key import (
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from torch import Tensor

_WEIGHTS = (kFp8StaticTensorSym, kFp8StaticChannelSym)
_ACTIVATIONS = {kFp8DynamicTokenSym: "token", kFp8DynamicTensorSym: "tensor", kFp8StaticTensorSym: "static"}


class TritonFp8Experts(FusedMoEExpertsModular):
    """FP8 per tensor or channel through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=89),),
        keys=tuple((weight, activation) for weight in _WEIGHTS for activation in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        lora=True,
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("FP8 weights come with w13_scale and w2_scale")
        inputs = {"w13_input_scale": weights.w13_input_scale, "w2_input_scale": weights.w2_input_scale}
        if self.kind == "static":
            for name, scale in inputs.items():
                if scale is None:
                    raise TensorError(f"{name} is missing, the activation key is {weights.activation_key}")
                inputs[name] = scale.float().contiguous()
        return KernelWeights(
            w13=weights.w13,
            w2=weights.w2,
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=weights.w13_scale,
                w2_scale=weights.w2_scale,
                a1_scale=inputs["w13_input_scale"],
                a2_scale=inputs["w2_input_scale"],
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
        )

    @property
    def kind(self) -> str:
        """Of the activations' scales: "token", "tensor" or "static"."""
        key = self.activation_key
        if key not in _ACTIVATIONS:
            raise TensorError(f"activations are quantised per token or tensor here, the key is {key}")
        return _ACTIVATIONS[key]

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Launch parameters for so many tokens, or rows T_max of each expert's buffer."""
        config = self.config
        plan = tile_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            gated=config.is_gated,
            capability=self.device_info.capability,
        )
        if self.batched:
            plan = plan.unsplit()
        if not on_gpu:
            # Triton's interpreter knows neither dependent launches nor warp specialisation
            up, down = (replace(product, specialised=False) for product in (plan.up, plan.down))
            plan = replace(plan, up=up, down=down, pdl=False)
        return plan

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_fp8.kernels.workspaces import row_fp8_workspaces

        config = self.config
        return row_fp8_workspaces(
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            kind=self.kind,
            weight_on_input=config.apply_router_weight_on_input and not self.batched,
            batched=self.batched,
            lora=config if config.is_lora_enabled else None,
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
        lora: LoRA | None = None,
    ) -> None:
        from moe_core.gemm.launch import Activation

        from moe_fp8.kernels.rows_moe import ActivationScales, row_fp8_fused_moe

        config, quant = self.config, weights.quant_config
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of FP8 weights holds w1_scale and w2_scale")
        if self.batched and expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        row_fp8_fused_moe(
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            activation_scales=ActivationScales(self.kind, quant.a1_scale, quant.a2_scale),
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
            raw=quantizes_while_loading(self.device_info.capability),
            lora=lora,
        )
