"""Tokens packed for an all-to-all: each once for every rank that has some of its experts, on the device.

    positions, counts = count_destinations(topk_ids, tables, ranks=8)       # counts: to the host, for the all-to-all
    rows, places = pack_tokens(x, ..., positions, counts, rows=sum(counts)) # quantised straight into the send buffer
    ... all-to-all, experts, all-to-all back: back [rows, K] ...
    reduce_pairs(back, places, len(back), output, rows=places)              # float32, ranks ascending

Kernels only; the twins are `ReplicaTables.choose` and `quantize_activation`.  The same tokens give the same bytes at
the same places on every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import check_dtype, check_shape
from moe_core.jit.launch import launch
from moe_core.ops._sizes import power_of_two
from moe_core.ops.token_layout import TokenCode, TokenLayout

if TYPE_CHECKING:
    from moe_core.expert_parallel import ReplicaTables


def count_destinations(
    topk_ids: Tensor, tables: ReplicaTables, *, ranks: int, copies: int = 1, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(positions [M, ranks], counts [ranks]), both int32: which tokens go to which rank, numbered in their order.

    A token goes to a rank once, however many of its experts are there; position -1: not at all.

    - ``topk_ids`` [M, k] int32 or int64, contiguous; ids out of range go nowhere
    - ``tables``: where experts are; ``offset``: see there
    - ``ranks`` that exchange tokens; ``copies`` of them in a row get the tokens of one expert-parallel rank
    """
    from moe_core.ops._dispatch_kernels import position_kernel
    from moe_core.ops._dispatch_launch import table_arguments

    tokens, top_k = topk_ids.shape
    check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    positions = torch.empty((tokens, ranks), dtype=torch.int32, device=topk_ids.device)
    counts = torch.empty((ranks,), dtype=torch.int32, device=topk_ids.device)
    block = min(max(power_of_two(tokens), 16), 1024)
    launch(
        position_kernel,
        (ranks,),
        topk_ids,
        table_arguments(tables),
        positions,
        counts,
        tokens,
        ranks,
        tables.stride,
        copies,
        offset,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return positions, counts


def pack_tokens(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    tables: ReplicaTables,
    code: TokenCode,
    positions: Tensor,
    counts: Tensor,
    *,
    rows: int,
    copies: int = 1,
    offset: int = 0,
    adapter_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(packed [rows, :attr:`TokenLayout.nbytes` of :meth:`TokenLayout.rows`] uint8, places [M, ranks] int32).

    Rank after rank, each one's tokens in their order; expert numbers are the local ones of the rank, -1 for slots of
    others.  ``places``: the row of each token for each rank, -1 where it does not go.

    - ``x`` [M, K], contiguous columns; ``code`` says how it is stored
    - ``topk_weights`` [M, k] float32, contiguous; ``adapter_ids`` [M] int32
    - ``positions``, ``counts`` of :func:`count_destinations` with the same ``tables``, ``copies`` and ``offset``
    - ``rows``: the sum of ``counts``, which the host knows
    """
    from moe_core.ops._dispatch_launch import launch_dispatch

    tokens, ranks = positions.shape
    check_shape("x", x, (tokens, code.columns))
    layout = TokenLayout.rows(code, topk_ids.shape[1], adapters=adapter_ids is not None)
    packed = torch.empty((rows, layout.nbytes), dtype=torch.uint8, device=x.device)
    places = torch.empty((tokens, ranks), dtype=torch.int32, device=x.device)
    launch_dispatch(
        x,
        topk_ids,
        topk_weights,
        adapter_ids,
        tables,
        code,
        layout,
        places,
        rows=tokens,
        ranks=ranks,
        copies=copies,
        offset=offset,
        out=packed,
        positions=positions,
        counts=counts,
    )
    return packed, places
