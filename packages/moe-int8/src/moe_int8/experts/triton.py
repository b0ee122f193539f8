"""Triton, int8 weights with one scale per output channel, int8 activations (sm_80 and newer).

Weights stay as the checkpoint has them.  Activations have one scale per token, one for all (both found at run time) or
one per expert (static), and zero points per token or per expert; for these, sums of the weights' rows are kept.
Standard and batched format.  ``moe_core.gemm.rows_moe`` says what a call consists of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    DeviceInfo,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEConfig,
    FusedMoEExpertsModular,
    KernelWeights,
    LoRA,
    MoEWeights,
    QuantKey,
    WorkspaceSpec,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading, tile_plan
from moe_core.quant_key import (
    kInt8DynamicTensorSym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
    kInt8StaticChannelSym,
    kInt8StaticTensorAsym,
    kInt8StaticTensorSym,
)
from torch import Tensor

from moe_int8.layout import row_sums, scale_and_zero
from moe_int8.sums import sum_reasons

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import RowFunctions

_ACTIVATIONS = {
    kInt8DynamicTokenSym: "token",
    kInt8DynamicTokenAsym: "token",
    kInt8DynamicTensorSym: "tensor",
    kInt8StaticTensorSym: "static",
    kInt8StaticTensorAsym: "static",
}


class TritonInt8Experts(FusedMoEExpertsModular):
    """INT8 per channel through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=tuple((kInt8StaticChannelSym, activation) for activation in _ACTIVATIONS),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        lora=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
    )

    @classmethod
    def extra_reasons(
        cls,
        config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        device: DeviceInfo,
    ) -> list[str]:
        return sum_reasons(config, weight_key, activation_key)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        if weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("int8 weights come with w13_scale and w2_scale")
        extra: dict[str, Tensor] = {}
        if self.zero_points:
            extra = {"w13_sums": row_sums(weights.w13), "w2_sums": row_sums(weights.w2)}
        if self.kind == "static":
            for name in ("w13", "w2"):
                scale, zero = getattr(weights, f"{name}_input_scale"), getattr(weights, f"{name}_input_zero_point")
                if scale is None or (zero is None) == self.zero_points:
                    raise TensorError(f"{name}'s static scales do not fit the activation key {self.activation_key}")
                if zero is not None:
                    extra[f"{name}_input"] = scale_and_zero(scale, zero)
        return KernelWeights(
            w13=weights.w13,
            w2=weights.w2,
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=weights.w13_scale,
                w2_scale=weights.w2_scale,
                a1_scale=weights.w13_input_scale,
                a2_scale=weights.w2_input_scale,
                a1_zp=weights.w13_input_zero_point,
                a2_zp=weights.w2_input_zero_point,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra=extra,
        )

    @property
    def kind(self) -> str:
        """Of the activations' scales: "token", "tensor" or "static"."""
        key = self.activation_key
        if key not in _ACTIVATIONS:
            raise TensorError(f"activations are quantised per token or tensor here, the key is {key}")
        return _ACTIVATIONS[key]

    @property
    def zero_points(self) -> bool:
        return self.activation_key is not None and not self.activation_key.symmetric

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def functions(self) -> RowFunctions:
        from moe_int8.kernels.rows import INT8, INT8_ZERO

        return INT8_ZERO if self.zero_points else INT8

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
        if self.batched or self.zero_points:
            # the sums of rows are those of the whole k loop
            plan = plan.unsplit()
        if not on_gpu:
            # Triton's interpreter knows neither dependent launches nor warp specialisation
            up, down = (replace(product, specialised=False) for product in (plan.up, plan.down))
            plan = replace(plan, up=up, down=down, pdl=False)
        return plan

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_core.gemm.workspaces import row_workspaces

        config = self.config
        return row_workspaces(
            torch.int8,
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            kind=self.kind,
            weight_on_input=config.apply_router_weight_on_input and not self.batched,
            batched=self.batched,
            scale=torch.int64 if self.zero_points else torch.float32,
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
        from moe_core.gemm.rows_moe import ActivationScales, row_fused_moe

        config, quant, extra = self.config, weights.quant_config, weights.extra
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of int8 weights holds w1_scale and w2_scale")
        if self.batched and expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        scales = ActivationScales(self.kind, quant.a1_scale, quant.a2_scale)
        if self.zero_points:
            scales = ActivationScales(self.kind, extra.get("w13_input"), extra.get("w2_input"))
        row_fused_moe(
            self.functions,
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            activation_scales=scales,
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
            w13_extra=_sums(extra.get("w13_sums")),
            w2_extra=_sums(extra.get("w2_sums")),
        )


def _sums(sums: Tensor | None) -> tuple[Any, ...]:
    return () if sums is None else (sums, sums.stride(0))
