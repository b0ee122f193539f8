"""Workspace tensors of fused layers, under the names that the layers look up."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_core.kernels.gemm.heuristics.cost import MAX_PARTIALS
from moe_core.kernels.ops.batch import batch_workspaces
from moe_core.kernels.ops.sort import sort_workspaces
from moe_core.spec.config import FusedMoEConfig
from moe_core.spec.workspace import WorkspaceSpec

#: Smallest tile height that a plan may request.
MIN_BLOCK_M = 8
#: Largest number of programs that share a mainloop.
MAX_SPLIT_K = 16
#: Name prefix of the LoRA workspaces.
LORA = "lora_"
#: Phases of a call: BEFORE_GEMM2 tensors are last read before gemm2 starts, FROM_GEMM2 tensors are written only from
#: then on.
BEFORE_GEMM2, FROM_GEMM2 = 0, 1


def order_workspaces(pairs: int, num_tokens: int, num_experts: int, batched: bool) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of the sort, or of the tile list in the batched format.

    Args:
        pairs: Number of (token, expert) pairs.
        num_tokens: Number of tokens; batched: rows of each expert's buffer.
        num_experts: Number of local experts.
        batched: Whether activations are in the batched format.

    Returns:
        Specifications of the workspace tensors.
    """
    if batched:
        return batch_workspaces(num_experts, num_tokens, MIN_BLOCK_M)
    return sort_workspaces(pairs, num_experts, MIN_BLOCK_M)


def split_k_workspace(config: FusedMoEConfig, pairs: int) -> WorkspaceSpec:
    """Return the workspace for the float32 partial sums of split-K.

    Args:
        config: Configuration of the layer.
        pairs: Largest number of pairs whose mainloops are split; 0 disables split-K.

    Returns:
        Specification of "partials", at most `MAX_PARTIALS` elements.
    """
    columns = max(2 * config.intermediate_size, config.hidden_size)
    return WorkspaceSpec("partials", (min(MAX_PARTIALS, MAX_SPLIT_K * pairs * columns),), torch.float32)


def lora_workspaces(config: FusedMoEConfig, pairs: int) -> tuple[WorkspaceSpec, ...]:
    """Return the workspaces of `moe_core.kernels.gemm.tiles.lora.Adapters`.

    Args:
        config: Configuration of the layer.
        pairs: Largest number of pairs; batched: of rows.

    Returns:
        Specifications of the workspace tensors; all names start with "lora_".
    """
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
