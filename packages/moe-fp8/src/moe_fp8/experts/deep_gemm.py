"""DeepGEMM, standard format: block FP8 on sm_90 and sm_100, MXFP8 on sm_100.

DeepGEMM computes the two grouped GEMMs. Sorting, quantization, activation and the top-k reduction are moe-core's. Rows
are grouped by expert in tiles of 128 rows, DeepGEMM's tile height:

    align      pairs by expert in whole tiles            x quantized once per token, its rows gathered
    product    y = x w13^T, bf16                         h = act(y), quantized
    product    y = h w2^T, bf16                          out[token] = sum over slots of weight * y

On sm_90 scales are float32 and weights keep the checkpoint's values. The tensor cores of sm_100 take power-of-two
scales: activations are quantized with such scales, and weights with other scales are requantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from moe_core import (
    GATED,
    NON_GATED,
    TRITON,
    Claims,
    ExpertTokensMetadata,
    FusedMoEExpertsModular,
    KernelWeights,
    MoEWeights,
    QuantKey,
    TensorError,
    WorkspaceSpec,
    cuda,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp8Dynamic,
    kMxfp8Static,
    make_quant_config,
)
from moe_core.api.libraries import (
    activate_and_quantize,
    align_pairs,
    align_workspaces,
    aligned_rows,
    gather_rows,
    quantize_activation,
    reduce_pairs,
)
from torch import Tensor

from moe_fp8.libraries import DEEP_GEMM
from moe_fp8.libraries.requantize import power_of_two_scales
from moe_fp8.libraries.ue8m0 import packed_exponents

#: rows per tile; a tile holds rows of one expert only
TILE = 128

HOPPER, BLACKWELL = cuda(min=90, max=90), cuda(min=100, max=109)

_CLAIMS = Claims(
    devices=(HOPPER, BLACKWELL),
    keys=((kFp8Static128BlockSym, kFp8Dynamic128Sym),),
    activations=GATED | NON_GATED,
    dtypes=frozenset({torch.bfloat16}),
    hidden_multiple=128,
    intermediate_multiple=128,
    keeps_nan=False,
    requires=(DEEP_GEMM, TRITON),
    verified_on=("NVIDIA H200 (sm90)",),
    notes="on sm100 scales are powers of two: those of activations, and weights whose scales are none are quantized "
    "anew; kernels are compiled when a shape is first used",
)


class DeepGemmExperts(FusedMoEExpertsModular):
    """Shared base of block FP8 and MXFP8; ``group`` columns of an operand share one scale."""

    group = 128

    @staticmethod
    def library() -> ModuleType:
        """Return DeepGEMM, imported on first use."""
        return DEEP_GEMM.load()

    @property
    def power_of_two(self) -> bool:
        """Whether the device supports power-of-two scales only."""
        return self.device_info.capability >= 100

    @property
    def row_key(self) -> QuantKey:
        """Quant key of the activations: float32 scales; DeepGEMM packs them to exponents if needed."""
        return kFp8Dynamic128Sym.with_group(1, self.group)

    def product(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, row_experts: Tensor) -> None:
        """Compute ``out`` [R, columns] = a b^T for rows grouped by expert.

        Args:
            a: activation values [R, K] and their scales.
            b: weights [E, columns, K] and their scales.
            out: result [R, columns].
            row_experts: int32 [R], the expert of each row; -1 in tiles that are not computed.
        """
        arguments, options = contiguous_arguments(a, b, out, row_experts, group=self.group)
        self.library().m_grouped_fp8_gemm_nt_contiguous(*arguments, **options)

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        if not self.power_of_two or weights.w13_scale is None or weights.w2_scale is None:
            return weights
        w13, w13_scale = power_of_two_scales(weights.w13, weights.w13_scale, (128, 128))
        w2, w2_scale = power_of_two_scales(weights.w2, weights.w2_scale, (128, 128))
        activation_key = self.row_key.with_scale_dtype(torch.uint8)
        return replace(weights, w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale, activation_key=activation_key)

    def convert(self, weights: MoEWeights) -> KernelWeights:
        activation_key = weights.activation_key
        weights = self.requantized(weights)
        scales = []
        for name, scale, matrix in (
            ("w13_scale", weights.w13_scale, weights.w13),
            ("w2_scale", weights.w2_scale, weights.w2),
        ):
            if scale is None:
                raise TensorError(f"{name} is missing, but weight_key is {weights.weight_key}")
            scales.append(packed_exponents(scale, matrix.shape[1]) if self.power_of_two else scale.contiguous())
        return KernelWeights(
            w13=weights.w13.contiguous(),
            w2=weights.w2.contiguous(),
            quant_config=make_quant_config(
                weight_key=weights.weight_key, activation_key=activation_key, w1_scale=scales[0], w2_scale=scales[1]
            ),
        )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        config, group = self.config, self.group
        hidden, inter = config.hidden_size, config.intermediate_size
        pairs = num_tokens * config.top_k
        rows, widest = aligned_rows(pairs, config.local_experts, TILE), max(hidden, inter)
        e4m3 = torch.float8_e4m3fn
        return (
            *align_workspaces(pairs, config.local_experts, TILE),
            WorkspaceSpec("x_values", (num_tokens * hidden,), e4m3),
            WorkspaceSpec("x_scales", (num_tokens * hidden // group,), torch.float32),
            WorkspaceSpec("a_values", (rows * widest,), e4m3),
            WorkspaceSpec("a_scales", (rows * widest // group,), torch.float32),
            WorkspaceSpec("y", (rows * max(config.w13_rows, hidden),), torch.bfloat16),
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
        config, key, pow2 = self.config, self.row_key, self.power_of_two
        tokens, hidden, inter = hidden_states.shape[0], config.hidden_size, config.intermediate_size
        rows = align_pairs(topk_ids, config.local_experts, TILE, workspace=workspace, expert_map=expert_map)
        count = rows.index.shape[0]
        x = workspace["x_values"][: tokens * hidden].view(tokens, hidden)
        x_scale = workspace["x_scales"][: tokens * hidden // self.group].view(tokens, -1)
        quantize_activation(hidden_states, key, out=x, scale_out=x_scale, power_of_two=pow2)
        a = _matrix(workspace["a_values"], count, hidden)
        a_scale = _columns(workspace["a_scales"], count, hidden // self.group)
        gather_rows(x, rows.index, per_row=config.top_k, scale=x_scale, count=rows.count, out=a, scale_out=a_scale)
        y = _matrix(workspace["y"], count, config.w13_rows)
        w13_scale, w2_scale = weights.quant_config.weight_scales
        self.product((a, a_scale), (weights.w13, w13_scale), y, rows.row_experts)
        h = _matrix(workspace["a_values"], count, inter)
        h_scale = _columns(workspace["a_scales"], count, inter // self.group)
        activate_and_quantize(
            config.activation,
            y,
            key,
            params=config.params,
            row_counts=rows.count,
            out=h,
            scale_out=h_scale,
            power_of_two=pow2,
        )
        y = _matrix(workspace["y"], count, hidden)
        self.product((h, h_scale), (weights.w2, w2_scale), y, rows.row_experts)
        reduce_pairs(
            y,
            topk_ids,
            config.local_experts,
            output,
            topk_weights=topk_weights,
            expert_map=expert_map,
            rows=rows.positions,
        )


class DeepGemmFp8BlockExperts(DeepGemmExperts):
    """DeepGEMM for FP8 weights in 128×128 blocks, activations in 1×128 groups."""

    claims = _CLAIMS


class DeepGemmMxfp8Experts(DeepGemmExperts):
    """DeepGEMM for MXFP8 weights and activations, on GPUs whose tensor cores read e8m0 scales."""

    group = 32
    claims = replace(_CLAIMS, devices=(BLACKWELL,), keys=((kMxfp8Static, kMxfp8Dynamic),), verified_on=(), notes="")

    def requantized(self, weights: MoEWeights) -> MoEWeights:
        return weights  # e8m0 scales are already powers of two


def contiguous_arguments(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, row_experts: Tensor, *, group: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build the arguments of DeepGEMM's ``m_grouped_fp8_gemm_nt_contiguous``.

    Args:
        a: activation values [R, K] and scales [R, K / group], stored column-major.
        b: weights [E, columns, K] and their scales.
        out: result [R, columns].
        row_experts: int32 [R], the expert of each row; -1 in tiles that are not computed.
        group: columns per scale.

    Returns:
        Positional arguments and keyword arguments.
    """
    return (a, b, out, row_experts), recipe(group)


def recipe(group: int) -> dict[str, Any]:
    """Return the scale-group options, empty for the library's default of 128 columns.

    Args:
        group: columns per scale.
    """
    return {} if group == 128 else {"recipe_a": (1, group), "recipe_b": (1, group)}


def _matrix(flat: Tensor, rows: int, columns: int) -> Tensor:
    return flat[: rows * columns].view(rows, columns)


def _columns(flat: Tensor, rows: int, columns: int) -> Tensor:
    """View as [rows, columns] in column-major order, the layout in which the TMA reads scales."""
    return flat[: rows * columns].view(columns, rows).t()
