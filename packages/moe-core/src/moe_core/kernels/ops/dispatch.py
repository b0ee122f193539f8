"""Pack and unpack tokens for an all-to-all or an all-gather between expert-parallel ranks.

For an all-to-all, each token is packed once per rank that holds some of its experts:

    positions, counts = count_destinations(topk_ids, tables, ranks=8)       # counts: to the host, for the all-to-all
    rows, places = pack_tokens(x, ..., positions, counts, rows=sum(counts)) # quantized straight into the send buffer
    ... all-to-all, experts, all-to-all back: back [rows, K] ...
    reduce_pairs(back, places, len(back), output, rows=places)              # float32, ranks ascending

For an all-gather, each token is packed once:

    rows = pack_all(x, ..., rows=most)
    came = unpack(gathered, code, top_k, held=(first, count))                # received tokens, local expert numbers

The module contains kernel launches only; the PyTorch references are `ReplicaTables.choose` and `quantize_activation`.
Results are deterministic: the same tokens give the same bytes at the same positions on every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import check_dtype, check_shape
from moe_core.kernels.launch.launch import launch
from moe_core.kernels.ops._sizes import power_of_two
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.spec.workspace import WorkspaceSpec

if TYPE_CHECKING:
    from moe_core.parallel.placement.tables import ReplicaTables


def count_destinations(
    topk_ids: Tensor, tables: ReplicaTables, *, ranks: int, copies: int = 1, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Count the tokens for each rank and number them in token order.

    A token goes to a rank once, however many of its experts are there.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64, contiguous. Ids out of range go nowhere.
        tables: Location of the experts.
        ranks: Number of ranks that exchange tokens.
        copies: Number of consecutive ranks that all receive the tokens of one expert-parallel rank.
        offset: Number of the first token; replicas of an expert are chosen by token number.

    Returns:
        ``(positions, counts)``: ``positions`` [M, ranks] int32, the number of the token among those for the rank, or -1
        where it does not go there; ``counts`` [ranks] int32, tokens per rank.
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
    """Pack tokens for an all-to-all, quantized as ``code`` specifies.

    The rows are ordered by rank, and by token within a rank. Expert numbers are local to the destination rank; slots
    whose expert is on another rank are -1.

    Args:
        x: Hidden states [M, K] with contiguous columns.
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        topk_weights: Router weights [M, k], float32, contiguous.
        tables: Location of the experts.
        code: Storage format of the hidden states.
        positions: Result [M, ranks] of :func:`count_destinations` for the same ``tables``, ``copies`` and ``offset``.
        counts: Tokens per rank [ranks], int32, from the same call.
        rows: Sum of ``counts``, which the host knows.
        copies: As in :func:`count_destinations`.
        offset: As in :func:`count_destinations`.
        adapter_ids: LoRA adapter of each token [M], int32.

    Returns:
        ``(packed, places)``: ``packed`` [rows, :attr:`TokenLayout.nbytes` of :meth:`TokenLayout.rows`] uint8;
        ``places`` [M, ranks] int32, the row of each token for each rank, or -1 where it does not go there.
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
    """Map expert ids to local expert numbers of a rank, for tokens that all ranks have.

    Args:
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        tables: Location of the experts.
        held: ``(first, count)`` of the rank's experts in the tables' ``slots``.
        offset: Number of the first token; replicas of an expert are chosen by token number.

    Returns:
        Local expert numbers [M, k] int32; -1 for experts that the rank does not compute.
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
    """Pack every token once, for an all-gather to all ranks.

    Expert numbers are those of the tables' ``slots``, -1 for ids out of range. Rows after the last token are zero and
    have experts -1.

    Args:
        x: Hidden states [M, K] with contiguous columns.
        topk_ids: Expert ids [M, k], int32 or int64, contiguous.
        topk_weights: Router weights [M, k], float32, contiguous.
        tables: Location of the experts.
        code: Storage format of the hidden states.
        rows: Number of rows to write, at least M.
        offset: As in :func:`pack_tokens`.
        adapter_ids: LoRA adapter of each token [M], int32.
        out: Tensor to write to; allocated by default.

    Returns:
        Packed rows [rows, :attr:`TokenLayout.nbytes` of :meth:`TokenLayout.rows`] uint8.
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
    """Tokens as :func:`unpack` returns them.

    Attributes:
        hidden: Hidden states [M, K], a view of the packed rows.
        scale: Scales [M, groups] if ``hidden`` holds quantized codes, else None.
        weights: Router weights [M, k], float32.
        experts: Expert numbers [M, k], int32.
        adapters: LoRA adapters [M], int32, or None.
    """

    hidden: Tensor
    scale: Tensor | None
    weights: Tensor
    experts: Tensor
    adapters: Tensor | None

    @staticmethod
    def specs(rows: int, code: TokenCode, top_k: int) -> list[WorkspaceSpec]:
        """Describe the memory of the outputs for rows without adapters.

        Args:
            rows: Number of rows.
            code: Storage format of the hidden states.
            top_k: Slots per token.

        Returns:
            The tensors that :meth:`inside` takes.
        """
        specs = [
            WorkspaceSpec("weights", (rows, top_k), torch.float32),
            WorkspaceSpec("experts", (rows, top_k), torch.int32),
        ]
        if code.key is not None:
            specs.append(WorkspaceSpec("scale", (rows, code.groups), code.scale_dtype))
        return specs

    @staticmethod
    def inside(packed: Tensor, code: TokenCode, memory: Mapping[str, Tensor]) -> UnpackedTokens:
        """Return the outputs for the tokens of ``packed`` in given memory, as :meth:`empty` does.

        Args:
            packed: Packed rows [M, bytes], uint8.
            code: Storage format of the hidden states.
            memory: Tensors of :meth:`specs`.

        Returns:
            Tokens whose hidden states are already valid.
        """
        hidden = packed[:, : code.hidden_nbytes].view(code.code_dtype)
        return UnpackedTokens(hidden, memory.get("scale"), memory["weights"], memory["experts"], None)

    @staticmethod
    def empty(packed: Tensor, code: TokenCode, top_k: int, *, adapters: bool = False) -> UnpackedTokens:
        """Allocate the outputs for the tokens of ``packed``; hidden states are a view of ``packed``.

        Args:
            packed: Packed rows [M, bytes], uint8.
            code: Storage format of the hidden states.
            top_k: Slots per token.
            adapters: Whether the rows contain adapters.

        Returns:
            Tokens whose hidden states are already valid; the other tensors are uninitialized.
        """
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
    """Unpack rows of :func:`pack_tokens` or :func:`pack_all`.

    One launch copies everything but the hidden states, which remain a view of ``packed``.

    Args:
        packed: Packed rows [M, bytes], uint8.
        code: Storage format of the hidden states, as when packing.
        top_k: Slots per token.
        adapters: Whether the rows contain adapters.
        held: ``(first, count)`` of the experts on this rank: they are renumbered from 0, others become -1.
            None keeps the numbers.
        out: Result of :meth:`UnpackedTokens.empty` for ``packed``; allocated by default.

    Returns:
        The tokens of ``packed``.
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
