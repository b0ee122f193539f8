"""Triton, int4 weights with scales by channel or group, int8 activations (W4A8): standard and batched format.

Two codes lie in a byte, which halves what the checkpoint's bytes take, and are unpacked in registers (sm_80 and newer);
``kernels/nibbles.py`` says how.  Activations have one scale per token, and with the asymmetric key a zero point.
``moe_core.gemm.rows_moe`` says what a call consists of.
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
    KeyPattern,
    LoRA,
    MoEWeights,
    QuantKey,
    WorkspaceSpec,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import quantizes_while_loading
from moe_core.quant_key import (
    GroupShape,
    kInt4W4A8StaticChannelSym,
    kInt4W4A8StaticGroup128Sym,
    kInt8DynamicTokenAsym,
    kInt8DynamicTokenSym,
)
from torch import Tensor

from moe_int8.groups import group_reasons
from moe_int8.kernels.wide_rule import wide_plan
from moe_int8.layout import group_scales, nibble_half, pack_nibbles, row_sums, scaled_row_sums
from moe_int8.sums import sum_reasons

if TYPE_CHECKING:
    from moe_core.gemm.rows_moe import RowFunctions

_GROUPS = KeyPattern(
    kInt4W4A8StaticGroup128Sym,
    (GroupShape(1, 128), GroupShape(1, 64), GroupShape(1, 32)),
    (torch.bfloat16, torch.float32),
)
_ACTIVATIONS = (kInt8DynamicTokenSym, kInt8DynamicTokenAsym)


class TritonW4A8Int8Experts(FusedMoEExpertsModular):
    """int4 weights that become int8 in registers."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=tuple((weight, key) for weight in (kInt4W4A8StaticChannelSym, _GROUPS) for key in _ACTIVATIONS),
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
        return group_reasons(config, weight_key) + sum_reasons(config, weight_key, activation_key)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.w13_scale, weights.w2_scale
        if w13_scale is None or w2_scale is None:
            raise TensorError("int4 weights come with w13_scale and w2_scale")
        half = nibble_half(self.group_size)
        extra: dict[str, Tensor] = {}
        if self.zero_points and self.group_size == -1:
            extra = {"w13_sums": row_sums(weights.w13) * 16, "w2_sums": row_sums(weights.w2) * 16}
        elif self.zero_points:
            extra = {
                "w13_sums": scaled_row_sums(weights.w13, w13_scale),
                "w2_sums": scaled_row_sums(weights.w2, w2_scale),
            }
        return KernelWeights(
            w13=pack_nibbles(weights.w13, half),
            w2=pack_nibbles(weights.w2, half),
            quant_config=make_quant_config(
                weight_key=weights.weight_key,
                activation_key=weights.activation_key,
                w1_scale=self._kernel_scale(w13_scale, half),
                w2_scale=self._kernel_scale(w2_scale, half),
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
            extra=extra,
        )

    def _kernel_scale(self, scale: Tensor, half: int) -> Tensor:
        # codes are 16 times as large in the kernel
        return scale / 16 if self.group_size == -1 else group_scales(scale, half, self.group_size)

    @property
    def group_size(self) -> int:
        """Columns that share a scale; -1: all of them."""
        if self.weight_key is None:
            raise TensorError("16-bit weights are not read here")
        return self.weight_key.group_size

    @property
    def zero_points(self) -> bool:
        return self.activation_key is not None and not self.activation_key.symmetric

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    @property
    def functions(self) -> RowFunctions:
        from moe_int8.kernels.nibbles import functions_of

        return functions_of(self.group_size, zero_points=self.zero_points)

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Launch parameters for so many tokens, or rows T_max of each expert's buffer."""
        config = self.config
        plan = wide_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            gated=config.is_gated,
            packed=True,
            stepwise=self.group_size != -1,
            capability=self.device_info.capability,
        )
        if self.batched or self.zero_points:
            # the sums of rows are those of the whole k loop
            plan = plan.unsplit()
        # Triton's interpreter knows no dependent launches
        return plan if on_gpu else replace(plan, pdl=False)

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
            kind="token",
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
            raise TensorError("the quant config of int4 weights holds w1_scale and w2_scale")
        if self.batched and expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        row_fused_moe(
            self.functions,
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            activation_scales=ActivationScales("token"),
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
