"""Triton, block-quantised e4m3 weights with e4m3 activations (sm_89 and newer), standard format.

Weights stay as the checkpoint has them.  A call is: sort the (token, expert) pairs and quantise x; first product,
bias, activation and quantisation; second product and router weight; sum over top-k.  On sm_90, with many rows per
expert, both products are a warp-specialised kernel of their own (``kernels/hopper.py``).
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
    FusedMoEExpertsModular,
    KernelWeights,
    KeyPattern,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    fp8_w8a8_moe_quant_config,
)
from moe_core.errors import TensorError
from moe_core.quant_key import GroupShape, kFp8Dynamic64Sym, kFp8Dynamic128Sym, kFp8Static128BlockSym
from torch import Tensor

_WIDE_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128))
_NARROW_BLOCKS = (GroupShape(64, 64), GroupShape(128, 64))


class TritonFp8BlockExperts(FusedMoEExpertsModular):
    """Block FP8 through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=89),),
        keys=(
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_WIDE_BLOCKS), kFp8Dynamic128Sym),
            (KeyPattern(kFp8Static128BlockSym, group_shapes=_NARROW_BLOCKS), kFp8Dynamic64Sym),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
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
            quant_config=fp8_w8a8_moe_quant_config(
                w1_scale=weights.w13_scale,
                w2_scale=weights.w2_scale,
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
                block_shape=(key.group_shape.row, key.group_shape.col),
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
        from moe_core.gemm.rule import tile_plan

        from moe_fp8.kernels.block_moe import block_fp8_fused_moe

        config, params, quant = self.config, self.config.params, weights.quant_config
        if quant.w1_scale is None or quant.w2_scale is None:
            raise TensorError("the quant config of block FP8 weights holds w1_scale and w2_scale")
        group = self.block_shape[1]
        plan = tile_plan(
            hidden_states.shape[0],
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            block_n=group,
            block_k=group,
            capability=self.device_info.capability,
        )
        if not hidden_states.is_cuda:
            # Triton's interpreter knows neither dependent launches nor warp specialisation
            up, down = (replace(product, specialised=False) for product in (plan.up, plan.down))
            plan = replace(plan, up=up, down=down, pdl=False)
        block_fp8_fused_moe(
            hidden_states,
            weights.w13,
            weights.w2,
            w13_scale=quant.w1_scale,
            w2_scale=quant.w2_scale,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            out=output,
            workspace=workspace,
            plan=plan,
            block_shape=self.block_shape,
            activation=Activation(
                config.activation.value,
                1.0 if params.alpha is None else params.alpha,
                0.0 if params.beta is None else params.beta,
                params.limit,
            ),
            w13_bias=quant.w1_bias,
            w2_bias=quant.w2_bias,
            expert_map=expert_map,
            apply_router_weight_on_input=config.apply_router_weight_on_input,
        )
