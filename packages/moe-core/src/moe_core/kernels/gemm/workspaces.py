"""Scratch memory that fused layers of the grouped GEMM need, by the names that they look for."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_core.kernels.gemm.heuristics.tiles import MAX_PARTIALS
from moe_core.kernels.ops.batch import batch_workspaces
from moe_core.kernels.ops.sort import sort_workspaces
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.workspace import WorkspaceSpec

#: the smallest tile of rows that a plan may ask for
MIN_BLOCK_M = 8
#: the most programs that share a k loop
MAX_SPLIT_K = 16
#: how the names start of what adapters need
LORA = "lora_"
#: phases of a call: what is read before gemm2 starts, and what is written from then on
BEFORE_GEMM2, FROM_GEMM2 = 0, 1


def order_workspaces(pairs: int, num_tokens: int, num_experts: int, batched: bool) -> tuple[WorkspaceSpec, ...]:
    """Of the sort, or of the list of tiles."""
    if batched:
        return batch_workspaces(num_experts, num_tokens, MIN_BLOCK_M)
    return sort_workspaces(pairs, num_experts, MIN_BLOCK_M)


def split_k_workspace(config: FusedMoEConfig, pairs: int) -> WorkspaceSpec:
    """Partial sums of split-K for at most ``pairs`` pairs; 0: k loops stay whole."""
    columns = max(2 * config.intermediate_size, config.hidden_size)
    return WorkspaceSpec("partials", (min(MAX_PARTIALS, MAX_SPLIT_K * pairs * columns),), torch.float32)


def lora_workspaces(config: FusedMoEConfig, pairs: int) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `moe_core.kernels.gemm.tiles.lora.Adapters` for at most ``pairs`` pairs (batched format:
    rows)."""
    wide = torch.bfloat16 if config.dtype is torch.bfloat16 else torch.float32
    parts = 2 if config.is_gated else 1
    sort = sort_workspaces(pairs, config.max_loras * config.local_experts, MIN_BLOCK_M)
    return (
        *(replace(spec, name=LORA + spec.name) for spec in sort),
        WorkspaceSpec("lora_group_ids", (pairs,), torch.int32),
        WorkspaceSpec("lora_low", (pairs, parts * config.max_lora_rank), wide),
        WorkspaceSpec("lora_w13", (pairs, parts * config.intermediate_size), wide, BEFORE_GEMM2),
        WorkspaceSpec("lora_w2", (pairs, config.hidden_size), wide, FROM_GEMM2),
    )
