"""Tokens packed for an all-to-all, each once for every rank that has some of its experts, or for an all-gather.

    positions, counts = count_destinations(topk_ids, tables, ranks=8)       # counts: to the host, for the all-to-all
    rows, places = pack_tokens(x, ..., positions, counts, rows=sum(counts)) # quantised straight into the send buffer
    ... all-to-all, experts, all-to-all back: back [rows, K] ...
    reduce_pairs(back, places, len(back), output, rows=places)              # float32, ranks ascending

    rows = pack_all(x, ..., rows=most)                                      # for an all-gather
    came = unpack(gathered, code, top_k, held=(first, count))                # what arrived, with local expert numbers

Kernels only; the twins are `ReplicaTables.choose` and `quantize_activation`.  The same tokens give the same bytes at
the same places on every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import check_dtype, check_shape
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout

if TYPE_CHECKING:
    from moe_core.parallel.placement.tables import ReplicaTables


def count_destinations(
    topk_ids: Tensor, tables: ReplicaTables, *, ranks: int, copies: int = 1, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(positions [M, ranks], counts [ranks]), both int32: which tokens go to which rank, numbered in their order.

    A token goes to a rank once, however many of its experts are there; position -1: not at all.

    - ``topk_ids`` [M, k] int32 or int64, contiguous; ids out of range go nowhere
    - ``tables``: where experts are; ``offset``: see there
    - ``ranks`` that exchange tokens; ``copies`` of them in a row get the tokens of one expert-parallel rank
    """
    from moe_core.kernels.ops._dispatch_kernels import position_kernel
    from moe_core.kernels.ops._dispatch_launch import table_arguments

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
    from moe_core.kernels.ops._dispatch_launch import launch_dispatch

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


def held_experts(topk_ids: Tensor, tables: ReplicaTables, held: tuple[int, int], *, offset: int = 0) -> Tensor:
    """[M, k] int32: local numbers of the experts that a rank computes of tokens that all ranks have; else -1.

    ``held``: (first number, how many) of the rank's experts in the tables' ``slots``; ``topk_ids`` [M, k] contiguous.
    """
    from moe_core.kernels.ops._dispatch_launch import table_arguments
    from moe_core.kernels.ops._gather_kernels import held_kernel

    check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    experts = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    pairs, block = topk_ids.numel(), 256
    launch(
        held_kernel,
        (-(-pairs // block),),
        topk_ids,
        table_arguments(tables),
        experts,
        pairs,
        *held,
        offset,
        TOP_K=topk_ids.shape[1],
        BLOCK=block,
        num_warps=4,
    )
    return experts


def pack_all(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    tables: ReplicaTables,
    code: TokenCode,
    *,
    rows: int,
    offset: int = 0,
    adapter_ids: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[rows, :attr:`TokenLayout.nbytes` of :meth:`TokenLayout.rows`] uint8: every token once, for all ranks.

    Expert numbers are those of the tables' ``slots``, -1 for ids out of range.  Rows behind the last token have zeros
    and experts -1.  Arguments as of :func:`pack_tokens`.  ``out``: where they are written, by default new memory.
    """
    from moe_core.kernels.ops._dispatch_launch import code_constants, table_arguments, tile
    from moe_core.kernels.ops._gather_kernels import gather_kernel

    top_k = topk_ids.shape[1]
    check_shape("x", x, (topk_ids.shape[0], code.columns))
    check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
    layout = TokenLayout.rows(code, top_k, adapters=adapter_ids is not None)
    packed = torch.empty((rows, layout.nbytes), dtype=torch.uint8, device=x.device) if out is None else out
    launch(
        gather_kernel,
        (rows, tile(code)[2]),
        x,
        topk_ids,
        topk_weights,
        adapter_ids,
        table_arguments(tables),
        packed,
        layout.numbers,
        x.shape[0],
        code.columns,
        x.stride(0),
        offset,
        TOP_K=top_k,
        BLOCK_K=power_of_two(top_k),
        ALIGNED=layout.is_aligned,
        **code_constants(code),
    )
    return packed


@dataclass(frozen=True, eq=False)
class UnpackedTokens:
    """``hidden`` [M, K], rows in what was unpacked, with ``scale`` [M, groups] where it is codes; ``weights`` [M, k]
    float32, ``experts`` [M, k] int32, ``adapters`` [M] int32 or None.
    """

    hidden: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapters: Tensor | None

    @staticmethod
    def empty(packed: Tensor, code: TokenCode, top_k: int, *, adapters: bool = False) -> UnpackedTokens:
        """For the tokens of ``packed``, whose hidden states are there already."""
        rows, device = packed.shape[0], packed.device
        hidden = packed[:, : code.hidden_nbytes].view(code.code_dtype)
        scale = None if code.key is None else torch.empty((rows, code.groups), dtype=code.scale_dtype, device=device)
        weights = torch.empty((rows, top_k), dtype=torch.float32, device=device)
        experts = torch.empty((rows, top_k), dtype=torch.int32, device=device)
        numbers = torch.empty((rows,), dtype=torch.int32, device=device) if adapters else None
        return UnpackedTokens(hidden, scale, weights, experts, numbers)


def unpack(
    packed: Tensor,
    code: TokenCode,
    top_k: int,
    *,
    adapters: bool = False,
    held: tuple[int, int] | None = None,
    out: UnpackedTokens | None = None,
) -> UnpackedTokens:
    """The tokens of ``packed`` [M, bytes], rows of :func:`pack_tokens` or :func:`pack_all` for ``code``.

    ``held``: (first number, how many) of the experts that this rank has, whose numbers become 0, 1, …; those of others
    become -1.  None: the numbers stay.  All but the hidden states is copied, by one launch.  ``out``:
    :meth:`UnpackedTokens.empty` of ``packed``, by default made here.
    """
    import triton.language as tl

    from moe_core.kernels.ops._gather_kernels import arrive_kernel

    layout = TokenLayout.rows(code, top_k, adapters=adapters)
    rows = packed.shape[0]
    check_shape("packed", packed, ("M", layout.nbytes))
    found = UnpackedTokens.empty(packed, code, top_k, adapters=adapters) if out is None else out
    scale = found.scale
    block, narrow = 32, scale is not None and scale.dtype.itemsize == 1
    launch(
        arrive_kernel,
        (-(-rows // block),),
        packed,
        scale.view(torch.uint8) if scale is not None and narrow else scale,
        found.weights,
        found.experts,
        found.adapters,
        layout.numbers,
        rows,
        code.groups,
        0 if held is None else held[0],
        None if held is None else held[1],
        dtype=tl.uint8 if narrow else tl.float32,
        TOP_K=top_k,
        BLOCK_K=power_of_two(top_k),
        BLOCK_G=min(power_of_two(max(code.groups, 1)), 64),
        BLOCK=block,
        num_warps=4,
    )
    return found
