"""Triton, block-quantised e4m3 weights with e4m3 activations (sm_89 and newer), standard and batched format.

Weights stay as the checkpoint has them; scales that are e8m0 exponents become float32.  A call is: sort the (token,
expert) pairs and quantise x; first product, bias, activation and quantisation; second product and router weight; sum
over top-k.  On sm_90, with many rows per expert, both products are a warp-specialised kernel of their own
(``kernels/hopper.py``).
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
    KeyPattern,
    LoRA,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.plan import TilePlan
from moe_core.gemm.rule import tile_plan
from moe_core.numerics import e8m0_to_float32, is_e8m0
from moe_core.quant_key import GroupShape, kFp8Dynamic64Sym, kFp8Dynamic128Sym, kFp8Static128BlockSym
from torch import Tensor

_WIDE_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128))
_NARROW_BLOCKS = (GroupShape(64, 64), GroupShape(128, 64))
_SCALES = (torch.float32, torch.uint8)


def _float32(scale: Tensor) -> Tensor:
    """The same scale in the kernels' type; exact."""
    return e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale


class TritonFp8BlockExperts(FusedMoEExpertsModular):
    """Block FP8 through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=89),),
        keys=(
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_WIDE_BLOCKS, scale_dtypes=_SCALES), kFp8Dynamic128Sym),
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_NARROW_BLOCKS, scale_dtypes=_SCALES), kFp8Dynamic64Sym),
        ),
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
        key = weights.weight_key
        if key is None or weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("block FP8 weights come with w13_scale and w2_scale")
        return KernelWeights(
            w13=weights.w13,
            w2=weights.w2,
            quant_config=make_quant_config(
                weight_key=key,
                activation_key=weights.activation_key,
                w1_scale=_float32(weights.w13_scale),
                w2_scale=_float32(weights.w2_scale),
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
        )

    @property
    def block_shape(self) -> tuple[int, int]:
        shape = self.weight_key.group_shape if self.weight_key is not None else GroupShape(128, 128)
        return shape.row, shape.col

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_fp8.kernels.workspaces import block_fp8_workspaces

        config = self.config
        return block_fp8_workspaces(
            num_tokens,
            config.top_k,
            config.local_experts,
            config.hidden_size,
            config.intermediate_size,
            config.dtype,
            self.block_shape,
            self.batched,
            config if config.is_lora_enabled else None,
        )

    @property
    def batched(self) -> bool:
        return self.activation_format is FusedMoEActivationFormat.BATCHED

    def plan(self, num_tokens: int, on_gpu: bool = True) -> TilePlan:
        """Launch parameters for so many tokens, or rows T_max of each expert's buffer."""
        config, group = self.config, self.block_shape[1]
        plan = tile_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            gated=config.is_gated,
            block_n=group,
            block_k=group,
            capability=self.device_info.capability,
        )
        if self.batched:
            plan = plan.unsplit()
        if not on_gpu:
            # Triton's interpreter knows neither dependent launches nor warp specialisation
            up, down = (replace(product, specialised=False) for product in (plan.up, plan.down))
            plan = replace(plan, up=up, down=down, pdl=False)
        return plan

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

        from moe_fp8.kernels.block_moe import block_fp8_fused_moe

        config, quant = self.config, weights.quant_config
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of block FP8 weights holds w1_scale and w2_scale")
        if self.batched and expert_tokens is None:
            raise TensorError("expert_tokens is missing: the batched format needs the rows in use per expert")
        block_fp8_fused_moe(
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            topk_weights=None if self.batched else topk_weights,
            topk_ids=None if self.batched else topk_ids,
            expert_num_tokens=expert_tokens.expert_num_tokens if self.batched and expert_tokens is not None else None,
            out=output,
            workspace=workspace,
            plan=self.plan(hidden_states.shape[-2], hidden_states.is_cuda),
            block_shape=self.block_shape,
            activation=Activation.of(config),
            w13_bias=quant.w1_bias,
            w2_bias=quant.w2_bias,
            expert_map=expert_map,
            apply_router_weight_on_input=config.apply_router_weight_on_input and not self.batched,
            lora=lora,
        )
