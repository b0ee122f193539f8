"""Triton, e4m3 weights with 16-bit activations (W8A16), standard and batched format.

Weights are widened in registers, so that no FP8 hardware is needed (sm_80 and newer).  They stay as the checkpoint has
them, except that rows get a multiple of 16 columns; MXFP8's scales are put in the order in which they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

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
)
from moe_core.errors import TensorError
from moe_core.gemm.experts import GroupedExperts
from moe_core.numerics import e8m0_to_float32, is_e8m0
from moe_core.quant_config import make_quant_config
from moe_core.quant_key import (
    GroupShape,
    QuantKey,
    kFp8Static128BlockSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kMxfp8Static,
)
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from moe_core.gemm.plan import TilePlan

    from moe_fp8.kernels.upcast_moe import UpcastWeights

_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128), GroupShape(64, 64), GroupShape(128, 64))
#: e8m0 scales that the kernel reads at a time
_SCALES_PER_WORD = 4


class TritonFp8UpcastExperts(GroupedExperts):
    """The computation; subclasses add ``claims`` and say what the activations are."""

    #: whether x and h are rounded to MXFP8
    mxfp8_activations: ClassVar[bool] = False

    def convert(self, weights: MoEWeights) -> KernelWeights:
        key = weights.weight_key
        if key is None or weights.w13_scale is None or weights.w2_scale is None:
            raise TensorError("FP8 weights come with w13_scale and w2_scale")
        return KernelWeights(
            w13=_whole_words(weights.w13),
            w2=_whole_words(weights.w2),
            quant_config=make_quant_config(
                weight_key=key,
                activation_key=weights.activation_key,
                w1_scale=_kernel_scale(key, weights.w13_scale, 2 if self.config.is_gated else 1),
                w2_scale=_kernel_scale(key, weights.w2_scale, 1),
                w1_bias=weights.w13_bias,
                w2_bias=weights.w2_bias,
            ),
        )

    @property
    def stored_dtype(self) -> torch.dtype:
        """How the kernels keep x and h."""
        from moe_fp8.kernels.upcast_workspaces import stored_dtype

        mxfp8_weights = self.weight_key == kMxfp8Static
        return stored_dtype(self.config.dtype, mxfp8_weights=mxfp8_weights, mxfp8_activations=self.mxfp8_activations)

    def chosen_plan(self, num_tokens: int) -> TilePlan:
        from moe_fp8.kernels.upcast_rule import upcast_plan
        from moe_fp8.kernels.upcast_workspaces import HALVES

        config, shape = self.config, None if self.weight_key is None else self.weight_key.group_shape
        return upcast_plan(
            num_tokens,
            config.top_k,
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            block_k=64 if shape is not None and shape.col == 64 else 128,
            stepwise=shape is not None and shape.row > 1,
            wide=self.stored_dtype is torch.float32,
            halves=self.stored_dtype is HALVES,
            gated=config.is_gated,
            split=self.shares_loops,
            capability=self.device_info.capability,
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        from moe_fp8.kernels.upcast_workspaces import upcast_batched_workspaces, upcast_workspaces

        config = self.config
        sizes = (config.local_experts, config.hidden_size, config.intermediate_size)
        if self.batched:
            return upcast_batched_workspaces(num_tokens, *sizes, dtype=self.stored_dtype)
        return upcast_workspaces(
            num_tokens,
            config.top_k,
            *sizes,
            dtype=self.stored_dtype,
            output_dtype=config.dtype,
            weighted=self.mxfp8_activations and config.apply_router_weight_on_input,
        )

    def kernel_weights(self, weights: KernelWeights) -> UpcastWeights:
        """What the kernels get of converted weights."""
        from moe_fp8.kernels.upcast_moe import UpcastWeights, WeightScale

        quant, key = weights.quant_config, self.weight_key
        if quant.w1_scale is None or quant.w2_scale is None or key is None:
            raise TensorError("the quant config of FP8 weights holds w1_scale and w2_scale")
        shape = key.group_shape
        kind = WeightScale.BLOCK
        if shape.is_per_tensor:
            kind = WeightScale.TENSOR
        elif shape.is_per_row:
            kind = WeightScale.CHANNEL
        elif key == kMxfp8Static:
            kind = WeightScale.MXFP8
        return UpcastWeights(
            weights.w13,
            weights.w2,
            quant.w1_scale,
            quant.w2_scale,
            kind,
            (shape.row, shape.col) if kind is WeightScale.BLOCK else (128, 128),
            quant.w1_bias,
            quant.w2_bias,
        )

    def fused_moe(self, x: Tensor, weights: KernelWeights, call: dict[str, Any]) -> None:
        from moe_fp8.kernels.upcast_moe import upcast_batched_moe, upcast_fused_moe

        operands = self.kernel_weights(weights)
        shared = {name: call[name] for name in ("out", "workspace", "plan", "activation")}
        if self.batched:
            upcast_batched_moe(
                x,
                operands,
                counts=call["expert_num_tokens"],
                mxfp8_activations=self.mxfp8_activations,
                **shared,
            )
            return
        upcast_fused_moe(
            x,
            operands,
            topk_weights=call["topk_weights"],
            topk_ids=call["topk_ids"],
            mxfp8_activations=self.mxfp8_activations,
            expert_map=call["expert_map"],
            apply_router_weight_on_input=call["apply_router_weight_on_input"],
            **shared,
        )


class TritonFp8WeightOnlyExperts(TritonFp8UpcastExperts):
    """Weights of any scaling, activations in the layer's dtype."""

    claims = Claims(
        devices=(cuda(min=80),),
        keys=(
            (kFp8StaticTensorSym, None),
            (kFp8StaticChannelSym, None),
            (KeyPattern(kFp8Static128BlockSym, _BLOCKS, (torch.float32, torch.uint8)), None),
            (kMxfp8Static, None),
        ),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H200 (sm90)",),
        notes="float32 layers multiply outside the tensor cores",
    )


def _whole_words(weights: Tensor) -> Tensor:
    """``weights`` [E, rows, columns] with rows of a multiple of 16 bytes at such addresses; copied only if need be."""
    columns = weights.shape[2]
    aligned = weights.stride(2) == 1 and all(s % 16 == 0 for s in (weights.data_ptr(), *weights.stride()[:2]))
    if columns % 16 == 0 and aligned:
        return weights
    codes = weights.view(torch.uint8) if weights.stride(2) == 1 else weights.contiguous().view(torch.uint8)
    return F.pad(codes, (0, -columns % 16)).contiguous().clone().view(weights.dtype)


def _kernel_scale(key: QuantKey, scale: Tensor, parts: int) -> Tensor:
    """Scales as the kernel reads them: float32, or MXFP8's bytes [E, ceil(columns / 128), rows, 4].

    Rows of each of the ``parts`` (gate, up) are padded to a multiple of 4: words start at multiples of 16 bytes.
    """
    if key == kMxfp8Static:
        experts, rows, groups = scale.shape
        halves = scale.view(torch.uint8).view(experts, parts, rows // parts, groups)
        halves = F.pad(halves, (0, -groups % _SCALES_PER_WORD, 0, -(rows // parts) % 4))
        words = halves.reshape(experts, -1, halves.shape[3] // _SCALES_PER_WORD, _SCALES_PER_WORD)
        return words.permute(0, 2, 1, 3).contiguous()
    return e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale
