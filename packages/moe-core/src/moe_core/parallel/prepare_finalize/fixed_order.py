"""Sums over ranks, and the one order of them in which a token's bits are the same whatever else is in the batch.

A library adds up in an order that follows from the size of the call and from a row's place in it.  In the fixed order
every rank's part is brought to who needs the sum, and is added there in float32, ranks ascending.  The parts of two
ranks have one sum in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core._support.async_result import Pending

if TYPE_CHECKING:
    from moe_core.parallel.distributed.communication import Communicator


def sum_parts(parts: Tensor, places: Tensor, output: Tensor) -> None:
    """output[m] = sum over r, ascending, of parts[places[m, r]] in float32; -1 for none.

    ``parts`` [n, K], ``places`` [M, R] int32, ``output`` [M, K].
    """
    from moe_core.kernels.ops._backend import use_triton
    from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch

    reduce = reduce_pairs if use_triton(output, "auto") else reduce_pairs_torch
    reduce(parts, places, max(len(parts), 1), output, rows=places.flatten())


def sum_ranks(among: Communicator, tensor: Tensor, *, fixed_order: bool) -> Pending[None]:
    """Begin to add ``tensor`` [M, K] up over the ranks, in place."""
    size = dist.get_world_size(among.group)
    if not tensor.numel() or size == 1:
        return Pending.done(None)
    if not fixed_order or size == 2:
        return among.begin("results are added up (all-reduce)", dist.all_reduce, tensor)
    parts = tensor.new_empty(size * len(tensor), tensor.shape[1])
    what = "results are gathered to be added up (all-gather)"
    gathering = among.begin(what, dist.all_gather_into_tensor, parts, tensor.contiguous())

    def finish() -> None:
        gathering.wait()
        sum_parts(parts, _places(tensor, len(tensor), size), tensor)

    return Pending(finish)


def sum_and_scatter(
    among: Communicator, output: Tensor, partial: Tensor, each: int, *, fixed_order: bool
) -> Pending[None]:
    """Begin to add up ``partial`` [R * each, K] of R ranks; ``output`` gets the first of this rank's ``each`` rows."""
    size = dist.get_world_size(among.group)
    if fixed_order and size > 2:
        parts = torch.empty_like(partial)
        what = "results are sent to be added up (all-to-all)"
        sending = among.begin(what, dist.all_to_all_single, parts, partial)

        def add() -> None:
            sending.wait()
            sum_parts(parts, _places(output, each, size), output)

        return Pending(add)
    whole = output.shape[0] == each
    own = output if whole else partial.new_empty(each, partial.shape[1])
    summed = among.begin("results are added up (reduce-scatter)", dist.reduce_scatter_tensor, own, partial)

    def finish() -> None:
        summed.wait()
        if not whole:
            output.copy_(own[: output.shape[0]])

    return Pending(finish)


def _places(output: Tensor, each: int, size: int) -> Tensor:
    """[M, R] int32: where each rank's part of each row is among ``each`` rows of every rank."""
    rows = torch.arange(len(output), dtype=torch.int32, device=output.device)[:, None]
    return rows + each * torch.arange(size, dtype=torch.int32, device=output.device)
