"""Scratch memory of `block_fp8_fused_moe`."""

from __future__ import annotations

import torch
from moe_core.ops.sort import sort_workspaces
from moe_core.workspace import WorkspaceSpec

#: the smallest tile of rows that a plan may ask for
MIN_BLOCK_M = 16
#: plans ask for gathered rows only above this many pairs
MIN_GATHERED_PAIRS = 256
#: the most programs of a product with a split k loop; each stores at most MIN_BLOCK_M rows
MAX_SPLIT_PROGRAMS = 528


def block_fp8_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    block_shape: tuple[int, int] = (128, 128),
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors for at most ``num_tokens`` tokens; ``num_experts`` local ones, ``dtype`` of the output."""
    pairs, group = num_tokens * top_k, block_shape[1]
    up_groups, down_groups = -(-hidden_size // group), -(-intermediate_size // group)
    e4m3 = torch.float8_e4m3fn
    # few pairs are never gathered
    sorted_rows = pairs if pairs > MIN_GATHERED_PAIRS else 0
    return (
        *sort_workspaces(pairs, num_experts, MIN_BLOCK_M),
        WorkspaceSpec("x_values", (num_tokens, up_groups * group), e4m3),
        WorkspaceSpec("x_scales", (num_tokens, up_groups), torch.float32),
        WorkspaceSpec("sorted_values", (sorted_rows, up_groups * group), e4m3),
        WorkspaceSpec("sorted_scales", (sorted_rows, up_groups), torch.float32),
        WorkspaceSpec("h_values", (pairs, down_groups * group), e4m3),
        WorkspaceSpec("h_scales", (pairs, down_groups), torch.float32),
        WorkspaceSpec("parts", (MAX_SPLIT_PROGRAMS * MIN_BLOCK_M * 2 * max(group, 128),), torch.float32),
        WorkspaceSpec("y", (pairs, hidden_size), dtype),
    )
