"""Ranks that write into each other's memory, all of them in this process."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import torch
from moe_core import FusedMoEKernel, FusedMoEParallelConfig
from moe_core.kernels.ops.exchange import ExchangeShape
from moe_core.parallel.distributed.symmetric import ExchangeBuffers, ExchangeRoom
from moe_core.parallel.prepare_finalize.all_to_all import AllToAllPrepareAndFinalize
from moe_core.parallel.prepare_finalize.low_latency import LowLatencyPrepareAndFinalize
from moe_core_exchange import buffers_of
from moe_core_rank_layers import Case, rank_parts


def ranks_of(case: Case, room: int, buffers: int = 2, timeout: float = 1.0):
    """The kernel of each rank; ranks that exchange tokens have buffers that reach each other."""
    config = case.config
    world = [
        FusedMoEParallelConfig.of_rank(
            rank, tp_size=case.tp, ep_size=case.ep, dp_size=case.dp, all2all_backend=case.all2all
        )
        for rank in range(case.tp * case.ep)
    ]
    shape = ExchangeShape(case.dp, room, config.hidden_size, config.top_k, config.dtype)
    shared = len(world) // case.dp  # sets of ranks that exchange tokens
    sets = [[buffers_of(shape, "cpu") for _ in range(buffers)] for _ in range(shared)]
    kernels = []
    for parallel in world:
        groups = SimpleNamespace(
            parallel=parallel,
            tokens="exchanged",
            timeout=timedelta(seconds=timeout),
            among=lambda _group: SimpleNamespace(members=[10 + rank for rank in range(case.dp)]),
        )
        mine = [numbered[parallel.dp_rank] for numbered in sets[parallel.tp_rank % shared]]
        # not by the oracle, by which ranks would compare what they were given
        oracle, selection, weights, placement = rank_parts(case, case.kind.weights(config), parallel)
        if case.all2all == "alltoall":
            movement = AllToAllPrepareAndFinalize(selection.config, groups, placement=placement)
            movement.counts = lambda _tokens, given: given  # calls follow each other: nobody can be waited for
            movement._room = ExchangeRoom(torch.device("cpu"))
            movement._room._buffers[: len(mine)] = [(buffer, None) for buffer in mine]
        else:
            own = ExchangeBuffers(mine)
            movement = LowLatencyPrepareAndFinalize(selection.config, groups, placement=placement, buffers=own)
        kernels.append(FusedMoEKernel(oracle.make_experts(selection), weights, movement))
    return world, kernels


def start(kernel, given, counts=None):
    x, weights, ids = given
    return kernel.start(x, topk_weights=weights, topk_ids=ids, tokens_per_rank=counts)


def outputs(case, world, calls):
    """Results of calls that all ranks have started, added up over tensor-parallel ranks with the same tokens."""
    for call in calls:
        call.run_experts()
    found = []
    for call in calls:
        call.finish_tokens()
        found.append(call._output)
    if case.dp == len(world):
        return found
    return [sum(found[rank - rank % case.tp : rank - rank % case.tp + case.tp]) for rank in range(len(world))]
