"""Scratch memory of the fused layers, by the names that they look for."""

from __future__ import annotations

import torch
from moe_core.ops.batch import batch_workspaces
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
    batched: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``num_experts`` local ones, ``dtype`` of the output.
    """
    rows, group = num_experts * num_tokens if batched else num_tokens, block_shape[1]
    pairs = rows if batched else num_tokens * top_k
    up_groups, down_groups = -(-hidden_size // group), -(-intermediate_size // group)
    e4m3 = torch.float8_e4m3fn
    # few pairs are never gathered
    sorted_rows = pairs if pairs > MIN_GATHERED_PAIRS and not batched else 0
    return (
        *_order(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("x_values", (rows, up_groups * group), e4m3),
        WorkspaceSpec("x_scales", (rows, up_groups), torch.float32),
        WorkspaceSpec("sorted_values", (sorted_rows, up_groups * group), e4m3),
        WorkspaceSpec("sorted_scales", (sorted_rows, up_groups), torch.float32),
        WorkspaceSpec("h_values", (pairs, down_groups * group), e4m3),
        WorkspaceSpec("h_scales", (pairs, down_groups), torch.float32),
        _parts(batched, max(group, 128)),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
    )


def _order(pairs: int, num_tokens: int, num_experts: int, batched: bool) -> tuple[WorkspaceSpec, ...]:
    """Of the sort, or of the list of tiles."""
    if batched:
        return batch_workspaces(num_experts, num_tokens, MIN_BLOCK_M)
    return sort_workspaces(pairs, num_experts, MIN_BLOCK_M)


def _parts(batched: bool, columns: int) -> WorkspaceSpec:
    """Of split products, which the batched format has none of."""
    return WorkspaceSpec("parts", (0 if batched else MAX_SPLIT_PROGRAMS * MIN_BLOCK_M * 2 * columns,), torch.float32)


def row_fp8_workspaces(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    *,
    kind: str,
    weight_on_input: bool = False,
    batched: bool = False,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `row_fp8_fused_moe` for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``kind`` of the activation scales: "token", "tensor" or "static".
    """
    rows = num_experts * num_tokens if batched else num_tokens
    pairs = rows if batched else num_tokens * top_k
    width, inner = -(-hidden_size // 128) * 128, -(-intermediate_size // 128) * 128
    e4m3, dynamic = torch.float8_e4m3fn, kind != "static"
    # 16 bits of float16 do not hold what an activation may make
    wide = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    return (
        *_order(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("x_weighted", (rows if weight_on_input and kind != "token" else 0, hidden_size), torch.float32),
        WorkspaceSpec("x_values", (rows if dynamic or batched else 0, width), e4m3),
        WorkspaceSpec("x_scales", (rows,), torch.float32),
        WorkspaceSpec("x_amax", (rows if kind == "tensor" else 0,), torch.int32),
        WorkspaceSpec("sorted_values", (0 if batched else pairs, width), e4m3),
        WorkspaceSpec("sorted_scales", (0 if batched else pairs,), torch.float32),
        WorkspaceSpec("amax", (max(pairs, 2),), torch.int32),
        WorkspaceSpec("h", (pairs if dynamic else 0, inner), wide),
        WorkspaceSpec("h_values", (pairs, inner), e4m3),
        WorkspaceSpec("h_scales", (pairs,), torch.float32),
        _parts(batched, 128),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
    )
