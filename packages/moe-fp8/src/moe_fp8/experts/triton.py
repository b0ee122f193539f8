"""Triton, block-quantised e4m3 weights with e4m3 activations (sm_89 and newer, gfx942, gfx950), both formats.

The tensor cores of gfx942 know another e4m3 (FNUZ): there Triton widens both operands to float16, which holds them.

Weights stay as the checkpoint has them; scales that are e8m0 exponents become float32.  A call is: sort the (token,
expert) pairs and quantise x; first product, bias, activation and quantisation; second product and router weight; sum
over top-k.  On sm_90, with many rows per expert, both products are a warp-specialised kernel of their own
(``kernels/hopper.py``).
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
    KeyPattern,
    MoEWeights,
    WorkspaceSpec,
    cuda,
    hip,
    make_quant_config,
)
from moe_core.errors import TensorError
from moe_core.gemm.experts import GroupedExperts
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


class TritonFp8BlockExperts(GroupedExperts):
    """Block FP8 through the grouped matrix product of ``moe_core.gemm``."""

    claims = Claims(
        devices=(cuda(min=89), hip("gfx942", "gfx950")),
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

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        config, group = self.config, self.block_shape[1]
        return tile_plan(
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

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_fp8.kernels.block_moe import block_fp8_fused_moe

        block_fp8_fused_moe(x, weights.w13, weights.w2, block_shape=self.block_shape, **call)
