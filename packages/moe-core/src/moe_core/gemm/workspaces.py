"""Scratch memory that fused layers of the grouped matrix product need, by the names that they look for."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_core.config import FusedMoEConfig
from moe_core.ops.batch import batch_workspaces
from moe_core.ops.sort import sort_workspaces
from moe_core.workspace import WorkspaceSpec

#: the smallest tile of rows that a plan may ask for
MIN_BLOCK_M = 16
#: the most programs of a product with a split k loop; each stores at most MIN_BLOCK_M rows
MAX_SPLIT_PROGRAMS = 528
#: how the names start of what adapters need
LORA = "lora_"


def order_workspaces(pairs: int, num_tokens: int, num_experts: int, batched: bool) -> tuple[WorkspaceSpec, ...]:
    """Of the sort, or of the list of tiles."""
    if batched:
        return batch_workspaces(num_experts, num_tokens, MIN_BLOCK_M)
    return sort_workspaces(pairs, num_experts, MIN_BLOCK_M)


def parts_workspace(batched: bool, columns: int) -> WorkspaceSpec:
    """Of split products, which the batched format has none of; ``columns`` of a tile of one half."""
    return WorkspaceSpec("parts", (0 if batched else MAX_SPLIT_PROGRAMS * MIN_BLOCK_M * 2 * columns,), torch.float32)


def lora_workspaces(config: FusedMoEConfig, pairs: int) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `moe_core.gemm.lora.Adapters` for at most ``pairs`` pairs (batched format: rows)."""
    wide = torch.bfloat16 if config.dtype is torch.bfloat16 else torch.float32
    parts = 2 if config.is_gated else 1
    sort = sort_workspaces(pairs, config.max_loras * config.local_experts, MIN_BLOCK_M)
    return (
        *(replace(spec, name=LORA + spec.name) for spec in sort),
        WorkspaceSpec("lora_numbers", (pairs,), torch.int32),
        WorkspaceSpec("lora_low", (pairs, parts * config.max_lora_rank), wide),
        WorkspaceSpec("lora_w13", (pairs, parts * config.intermediate_size), wide),
        WorkspaceSpec("lora_w2", (pairs, config.hidden_size), wide),
    )


def row_workspaces(
    element: torch.dtype,
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
    scale: torch.dtype = torch.float32,
    lora: FusedMoEConfig | None = None,
) -> tuple[WorkspaceSpec, ...]:
    """Scratch tensors of `moe_core.gemm.rows_moe` for at most ``num_tokens`` tokens, or T_max of the batched format.

    ``element`` of one byte, ``kind`` of the activation scales: "token", "tensor" or "static"; ``scale``: their type.
    ``lora``: the layer's config where it is enabled for adapters.
    """
    rows = num_experts * num_tokens if batched else num_tokens
    pairs = rows if batched else num_tokens * top_k
    width, inner = -(-hidden_size // 128) * 128, -(-intermediate_size // 128) * 128
    dynamic = kind != "static"
    weighted = weight_on_input and (lora is not None or kind != "token")
    # 16 bits of float16 do not hold what an activation may make
    wide = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    return (
        *order_workspaces(pairs, num_tokens, num_experts, batched),
        WorkspaceSpec("x_weighted", (rows if weighted else 0, hidden_size), torch.float32),
        WorkspaceSpec("x_values", (rows if dynamic or batched else 0, width), element),
        WorkspaceSpec("x_scales", (rows,), scale),
        WorkspaceSpec(
            "x_amax", (rows if kind == "tensor" or (not dynamic and element is torch.int8) else 0,), torch.int32
        ),
        WorkspaceSpec("sorted_values", (0 if batched else pairs, width), element),
        WorkspaceSpec("sorted_scales", (0 if batched else pairs,), scale),
        WorkspaceSpec("amax", (max(pairs, 2),), torch.int32),
        WorkspaceSpec("h", (pairs if dynamic or lora is not None else 0, inner), wide),
        WorkspaceSpec("h_values", (pairs, inner), element),
        WorkspaceSpec("h_scales", (pairs,), scale),
        parts_workspace(batched, 128),
        WorkspaceSpec("y", (0 if batched else pairs, hidden_size), dtype),
        *(() if lora is None else lora_workspaces(lora, pairs)),
    )
