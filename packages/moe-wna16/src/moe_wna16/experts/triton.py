"""Triton, grouped INT4 and INT8 codes with 16-bit activations, and W4AFP8.

W4AFP8 is int4 codes with e4m3 activations. Weights keep the checkpoint's layout and are dequantized in registers by
plain Triton operations. Scales and zero points are transposed once, so that those of a group are contiguous. Every key
of the scheme is supported, in standard and batched format.

``moe_core.kernels.gemm.fused.layer`` describes the steps of a call, ``kernels/codes.py`` the exactness of its products.
e4m3 activations are multiplied in bfloat16, which represents them exactly.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    FusedMoEActivationFormat,
    KernelWeights,
    MoEWeights,
    TensorError,
    cuda,
    hip,
    kFp8DynamicTokenSym,
    kInt4Static,
)
from moe_core.api.experts import GroupedExperts, LayerProblem, as_words
from torch import Tensor

from moe_wna16.keys import BASES, every_key, in_order
from moe_wna16.layout import arranged_groups, by_group, zero_points

if TYPE_CHECKING:
    from moe_core.api.kernels import ActivationScheme, GemmWeight

#: activation rows are padded to a multiple of this many columns
_STEP = 128


class TritonWNA16Experts(GroupedExperts):
    """Codes dequantized in registers, through the grouped GEMM of ``moe_core.kernels.gemm``."""

    family = "as_stored"
    #: separate partial sums for the four groups of a step take registers; 304 bytes occur on sm100 with zero points
    accepted_spills = (304, 320)

    claims = Claims(
        devices=(cuda(min=80), hip("gfx942", "gfx950")),
        keys=(*((every_key(base), None) for base in BASES), (in_order(kInt4Static), kFp8DynamicTokenSym)),
        activations=GATED | NON_GATED,
        dtypes=frozenset({torch.bfloat16, torch.float16, torch.float32}),
        bias=True,
        expert_map=True,
        apply_router_weight_on_input=True,
        batch_invariant=True,
        formats=frozenset({FusedMoEActivationFormat.STANDARD, FusedMoEActivationFormat.BATCHED}),
        requires=(TRITON,),
        verified_on=("NVIDIA H100 (sm90)", "NVIDIA H200 (sm90)"),
    )

    def convert(self, weights: MoEWeights) -> KernelWeights:
        w13_scale, w2_scale = weights.weight_scales

        def zeros(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return by_group(zero_points(tensor, self.bits), self.group_size // self.kernel_group_size)

        def groups(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else arranged_groups(tensor, self.bits, _STEP)

        def scales(tensor: Tensor) -> Tensor:
            return by_group(tensor, self.group_size // self.kernel_group_size)

        return KernelWeights(
            w13=as_words(weights.w13),
            w2=as_words(weights.w2),
            quant_config=weights.quant_config(
                w1_scale=scales(w13_scale),
                w2_scale=scales(w2_scale),
                w1_zp=zeros(weights.w13_zero_point),
                w2_zp=zeros(weights.w2_zero_point),
                w1_g_idx=groups(weights.w13_g_idx),
                w2_g_idx=groups(weights.w2_g_idx),
            ),
        )

    @property
    def bits(self) -> int:
        """Bits per code."""
        if self.weight_key is None:
            raise TensorError("weight_key is None (16-bit weights), expected a quantized weight key")
        return self.weight_key.dtype.bits

    @property
    def group_size(self) -> int:
        """Columns that share a scale; -1 for one scale per row."""
        return -1 if self.weight_key is None else self.weight_key.group_size

    @property
    def short_steps(self) -> bool:
        """Whether a mainloop step has 32 columns: if permuted, or if no tensor core is used."""
        return self.permuted or (self.config.dtype is torch.float32 and not self.quantized)

    @property
    def kernel_group_size(self) -> int:
        """Group size in the kernel: like :attr:`group_size`, but at most a short step's columns."""
        return 32 if self.short_steps and not self.permuted and self.group_size != -1 else self.group_size

    @property
    def quantized(self) -> bool:
        """Whether x and h are quantized."""
        return self.activation_key is not None

    @property
    def permuted(self) -> bool:
        """Whether columns are grouped by activation order."""
        return self.weight_key is not None and self.weight_key.permuted

    @cached_property
    def problem(self) -> LayerProblem:
        dtype_bytes = 2 if self.quantized else self.config.dtype.itemsize
        return replace(super().problem, dtype_bytes=dtype_bytes, group_size=self.group_size, permuted=self.permuted)

    def activation_scheme(self, weights: KernelWeights | None) -> ActivationScheme:
        from moe_core.api.kernels import as_stored_scheme

        quant, key = None if weights is None else weights.quant_config, self.weight_key
        return as_stored_scheme(
            self.activation_key,
            self.bits,
            self.config.dtype,
            pre_scaled=key is not None and key.pre_scaled,
            pre_scales=(None, None) if quant is None else (quant.w1_pre_scale, quant.w2_pre_scale),
        )

    def gemm_weight(self, name: str, weights: KernelWeights) -> GemmWeight:
        from moe_core.api.kernels import SHORT_STEP, STEP, packed_weight

        from moe_wna16.kernels.codes import code_functions

        quant, first, on_gpu = weights.quant_config, name == "w13", weights.device.type != "cpu"
        scales, bias = self.scales(name, weights)
        column_groups = quant.w1_g_idx if first else quant.w2_g_idx
        # in the interpreter the number of operations counts, not their size
        step = SHORT_STEP if self.short_steps and (on_gpu or not self.permuted) else STEP
        groups = -1 if column_groups is not None else max(step // self.kernel_group_size, 0)
        return packed_weight(
            weights.w13 if first else weights.w2,
            self.bits,
            *self.sizes(name),
            scales,
            code_functions(self.activation_key, self.bits, groups),
            others=quant.w1_zp if first else quant.w2_zp,
            column_groups=column_groups,
            bias=bias,
            step=step,
        )
