"""DeepGEMM, batched format: block FP8 on sm_90 and sm_100.

Each expert has a separate token buffer whose first rows are in use; DeepGEMM's masked GEMM computes only those. The
buffers are padded to whole tiles, so that a tile never extends into the next expert's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from moe_core import ExpertTokensMetadata, FusedMoEActivationFormat, KernelWeights, WorkspaceSpec
from moe_core.api.libraries import activate_and_quantize, quantize_activation
from torch import Tensor

from moe_fp8.experts.deep_gemm import TILE, DeepGemmFp8BlockExperts, recipe


class BatchedDeepGemmFp8BlockExperts(DeepGemmFp8BlockExperts):
    """Batched counterpart of the standard class, for ``[E_local, T_max, K]``; same conversion."""

    claims = replace(
        DeepGemmFp8BlockExperts.claims,
        formats=frozenset({FusedMoEActivationFormat.BATCHED}),
        # in this format the prepare step applies router weights to the input
        apply_router_weight_on_input=True,
        notes="rows beyond those in use are not written. " + DeepGemmFp8BlockExperts.claims.notes,
    )

    def workspaces(self, num_tokens: int) -> tuple[WorkspaceSpec, ...]:
        config = self.config
        hidden, inter = config.hidden_size, config.intermediate_size
        rows = config.local_experts * _padded(num_tokens)
        widest = max(hidden, inter)
        return (
            WorkspaceSpec("a_values", (rows * widest,), torch.float8_e4m3fn),
            WorkspaceSpec("a_scales", (rows * widest // self.group,), torch.float32),
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
        experts, tokens, hidden = hidden_states.shape
        inter, counts = config.intermediate_size, ExpertTokensMetadata.rows_in_use(expert_tokens)
        height = _padded(tokens)
        # Assumes evenly distributed tokens; DeepGEMM uses it only to choose a kernel.
        expected = min(tokens, max(1, -(-tokens * config.top_k // config.num_experts)))
        w13_scale, w2_scale = weights.quant_config.weight_scales

        def product(a: Tensor, scale: Tensor, b: tuple[Tensor, Tensor], out: Tensor) -> None:
            arguments, options = masked_arguments((a, scale), b, out, counts, expected, group=self.group)
            self.library().m_grouped_fp8_gemm_nt_masked(*arguments, **options)

        a = _buffers(workspace["a_values"], experts, height, hidden)
        a_scale = _column_buffers(workspace["a_scales"], experts, height, hidden // self.group)
        quantize_activation(
            hidden_states,
            key,
            row_counts=counts,
            out=a[:, :tokens],
            scale_out=a_scale[:, :tokens],
            power_of_two=pow2,
        )
        y = _buffers(workspace["y"], experts, height, config.w13_rows)
        product(a, a_scale, (weights.w13, w13_scale), y)
        h = _buffers(workspace["a_values"], experts, height, inter)
        h_scale = _column_buffers(workspace["a_scales"], experts, height, inter // self.group)
        activate_and_quantize(
            config.activation,
            y[:, :tokens],
            key,
            params=config.params,
            row_counts=counts,
            out=h[:, :tokens],
            scale_out=h_scale[:, :tokens],
            power_of_two=pow2,
        )
        if height == tokens:
            product(h, h_scale, (weights.w2, w2_scale), output)
            return
        y = _buffers(workspace["y"], experts, height, hidden)
        product(h, h_scale, (weights.w2, w2_scale), y)
        output.copy_(y[:, :tokens])


def masked_arguments(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor, counts: Tensor, expected: int, *, group: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build the arguments of DeepGEMM's ``m_grouped_fp8_gemm_nt_masked``.

    Args:
        a: activation values and scales, per expert as in `contiguous_arguments`.
        b: weights [E, columns, K] and their scales.
        out: result, one buffer per expert.
        counts: int32 [E], number of valid rows per expert.
        expected: estimated number of valid rows per expert.
        group: columns per scale.

    Returns:
        Positional arguments and keyword arguments.
    """
    return (a, b, out, counts, expected), recipe(group)


def _padded(tokens: int) -> int:
    return -(-tokens // TILE) * TILE


def _buffers(flat: Tensor, experts: int, rows: int, columns: int) -> Tensor:
    return flat[: experts * rows * columns].view(experts, rows, columns)


def _column_buffers(flat: Tensor, experts: int, rows: int, columns: int) -> Tensor:
    """View as [experts, rows, columns], each expert in column-major order."""
    return flat[: experts * rows * columns].view(experts, columns, rows).transpose(1, 2)
