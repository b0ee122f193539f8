"""Sums over ranks, optionally in a fixed order that makes them batch invariant.

A library sums in an order that depends on the size of the call and on a row's position in it. In the fixed order the
partial results of every rank are sent to the ranks that need the sum, and are added there in float32, ranks ascending.
A token's bits then do not depend on the rest of the batch. The sum of two ranks is the same in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core._support.async_result import AsyncResult

if TYPE_CHECKING:
    from moe_core.parallel.distributed.communication import Communicator


def sum_parts(parts: Tensor, places: Tensor, output: Tensor) -> None:
    """Compute output[m] = sum over r, ascending, of parts[places[m, r]], in float32.

    Args:
        parts: Partial results, ``[n, K]``.
        places: Row of each rank's partial result in ``parts``, int32 ``[M, R]``; -1 for none.
        output: ``[M, K]``, written.
    """
    from moe_core.kernels.ops._backend import use_triton
    from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch

    reduce = reduce_pairs if use_triton(output, "auto") else reduce_pairs_torch
    reduce(parts, places, max(len(parts), 1), output, rows=places.flatten())


def sum_ranks(among: Communicator, tensor: Tensor, *, fixed_order: bool) -> AsyncResult[None]:
    """Begin to sum a tensor over ranks, in place.

    Args:
        among: The ranks.
        tensor: Partial results ``[M, K]``, overwritten with the sum.
        fixed_order: Whether to use the fixed order.

    Returns:
        The pending result.
    """
    size = among.size
    if not tensor.numel() or size == 1:
        return AsyncResult.done(None)
    if not fixed_order or size == 2:
        return among.begin("results are added up (all-reduce)", dist.all_reduce, tensor)
    parts = tensor.new_empty(size * len(tensor), tensor.shape[1])
    what = "results are gathered to be added up (all-gather)"
    gathering = among.begin(what, dist.all_gather_into_tensor, parts, tensor.contiguous())

    def finish() -> None:
        gathering.wait()
        sum_parts(parts, _places(tensor, len(tensor), size), tensor)

    return AsyncResult(finish)


def sum_and_scatter(
    among: Communicator, output: Tensor, partial: Tensor, each: int, *, fixed_order: bool, overlap: bool = True
) -> AsyncResult[None]:
    """Begin to sum partial results over ranks; each rank gets a slice of the sum.

    Args:
        among: The R ranks.
        output: The first rows of this rank's slice; at most ``each``.
        partial: Partial results ``[R * each, K]``.
        each: Number of rows per rank.
        fixed_order: Whether to use the fixed order.
        overlap: Whether work that follows may overlap with the sum, which takes the host longer.

    Returns:
        The pending result.
    """
    size = among.size
    if fixed_order and size > 2:
        parts = torch.empty_like(partial)
        what = "results are sent to be added up (all-to-all)"
        sending = among.begin(what, dist.all_to_all_single, parts, partial)

        def add() -> None:
            sending.wait()
            sum_parts(parts, _places(output, each, size), output)

        return AsyncResult(add)
    whole = output.shape[0] == each
    own = output if whole else partial.new_empty(each, partial.shape[1])
    what, summed = "results are added up (reduce-scatter)", None
    if overlap:
        summed = among.begin(what, dist.reduce_scatter_tensor, own, partial)
    else:
        among.reduce_scatter(what, own, partial)
        if whole:
            return AsyncResult.done(None)

    def finish() -> None:
        if summed is not None:
            summed.wait()
        if not whole:
            output.copy_(own[: output.shape[0]])

    return AsyncResult(finish)


def _places(output: Tensor, each: int, size: int) -> Tensor:
    """Rows of the partial results in the gathered tensor, int32 [M, R].

    Args:
        output: ``[M, K]``.
        each: Number of rows per rank.
        size: Number of ranks R.
    """
    rows = torch.arange(len(output), dtype=torch.int32, device=output.device)[:, None]
    return rows + each * torch.arange(size, dtype=torch.int32, device=output.device)
