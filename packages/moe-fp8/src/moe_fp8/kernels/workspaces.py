"""Scratch memory of the fused layers, by the names that they look for."""

from __future__ import annotations

import torch
from moe_core.config import FusedMoEConfig
from moe_core.gemm.workspaces import (
    MAX_SPLIT_PROGRAMS,
    MIN_BLOCK_M,
    lora_workspaces,
    order_workspaces,
    parts_workspace,
)
from moe_core.workspace import WorkspaceSpec

__all__ = [
    "MAX_SPLIT_PROGRAMS",
    "MIN_BLOCK_M",
    "MIN_GATHERED_PAIRS",
    "block_fp8_workspaces",
]

#: plans ask for gathered rows only above this many pairs
MIN_GATHERED_PAIRS = 256


def block_fp8_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    block_shape: tuple[int, int] = (128, 128),
    batched: bool = False,
    lora: FusedMoEConfig | None = None,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``num_experts`` local ones, ``dtype`` of the output; ``lora``: the layer's config where it is enabled for adapters.
    """
    rows, group = num_experts * num_tokens if batched else num_tokens, block_shape[1]
    pairs = rows if batched else num_tokens * top_k
    up_groups, down_groups = -(-hidden_size // group), -(-intermediate_size // group)
    e4m3 = torch.float8_e4m3fn
    # few pairs are never gathered
    sorted_rows = pairs if pairs > MIN_GATHERED_PAIRS and not batched else 0
    # 16 bits of float16 do not hold what an activation may make
    wide = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("x_values", (rows, up_groups * group), e4m3),
        WorkspaceSpec("x_scales", (rows, up_groups), torch.float32),
        WorkspaceSpec("sorted_values", (sorted_rows, up_groups * group), e4m3),
        WorkspaceSpec("sorted_scales", (sorted_rows, up_groups), torch.float32),
        WorkspaceSpec("h", (0 if lora is None else pairs, down_groups * group), wide),
        WorkspaceSpec("h_values", (pairs, down_groups * group), e4m3),
        WorkspaceSpec("h_scales", (pairs, down_groups), torch.float32),
        parts_workspace(batched, max(group, 128)),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
        *(() if lora is None else lora_workspaces(lora, pairs)),
    )
