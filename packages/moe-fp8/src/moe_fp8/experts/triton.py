"""Triton, block FP8 weights and activations (sm_89+, gfx942, gfx950), both formats.

The tensor cores of gfx942 use a different e4m3 (FNUZ); there Triton converts both operands to float16, which is exact.
On sm_90 weights become block-major (`GroupedExperts.block_major`), elsewhere they keep the checkpoint's layout. e8m0
scales become float32. The steps of a call:

1. Sort the (token, expert) pairs and quantize x.
2. gemm1, bias, activation and quantization.
3. gemm2 and router weight.
4. Reduce over top-k.

On sm_90, with many rows per expert, a dedicated warp-specialized kernel runs both GEMMs
(``kernels/hopper_blockwise.py``). Small batches whose tokens hardly share experts skip sorting
(`moe_core.kernels.gemm.gemv.scaled`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    GroupShape,
    KernelWeights,
    KeyPattern,
    MoEWeights,
    cuda,
    e8m0_to_float32,
    hip,
    is_e8m0,
    kFp8Dynamic64Sym,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from moe_core.api.experts import WHOLE_COLUMNS, LayerProblem, ScaledGemvExperts
from torch import Tensor

if TYPE_CHECKING:
    from moe_core.api.kernels import ActivationScheme, GemmWeight

_WIDE_BLOCKS = (GroupShape(128, 128), GroupShape(64, 128))
_NARROW_BLOCKS = (GroupShape(64, 64), GroupShape(128, 64))
_SCALES = (torch.float32, torch.uint8)


def _float32(scale: Tensor) -> Tensor:
    """Convert a scale to float32, the kernels' dtype; exact."""
    return e8m0_to_float32(scale) if is_e8m0(scale.dtype) else scale


class TritonFp8BlockExperts(ScaledGemvExperts):
    """Block FP8 through the grouped GEMM of ``moe_core.kernels.gemm``."""

    family = "scaled_mm"
    #: blocks narrower than a tile need two scales per column tile next to two accumulators
    accepted_spills = (448, 448)

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
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        lora=True,
        requires=(TRITON,),
        takes_quantized=True,
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales
        return KernelWeights(
            w13=self._stored(weights, "w13"),
            w2=self._stored(weights, "w2"),
            quant_config=weights.quant_config(w1_scale=_float32(w13_scale), w2_scale=_float32(w2_scale)),
        )

    def _stored(self, weights: MoEWeights, name: str) -> Tensor:
        # narrower blocks keep the checkpoint's layout
        tensor: Tensor = getattr(weights, name)
        return self.block_major(weights, name) if self.block_shape[1] == WHOLE_COLUMNS else tensor

    @property
    def block_shape(self) -> tuple[int, int]:
        shape = self.weight_key.group_shape if self.weight_key is not None else GroupShape(128, 128)
        return shape.row, shape.col

    def vector_groups(self) -> tuple[Any, int]:
        from moe_core.api.kernels import quantize_group

        return quantize_group, self.block_shape[1]

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_fp8.kernels.block import block_scheme

        return block_scheme(self.block_shape[1])

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        from moe_fp8.kernels.block import block_weight

        tensor = weights.w13 if name == "w13" else weights.w2
        return block_weight(tensor, *self.scales(name, weights), self.sizes(name)[0], self.block_shape)

    @cached_property
    def problem(self) -> LayerProblem:
        return replace(super().problem, group_size=self.block_shape[1])
