"""Several ranks' exchange buffers in one process, whose kernels run one rank after another."""

from __future__ import annotations

import torch
from moe_core.kernels.ops.exchange import ExchangeBuffer, ExchangeShape
from moe_core.parallel.placement.placement import ExpertPlacement
from torch import Tensor


def buffers_of(shape: ExchangeShape, device: torch.device | str) -> list[ExchangeBuffer]:
    """A buffer for each rank, poisoned but for its signals, each of which has the addresses of all."""
    memories = [torch.full((shape.nbytes,), 0xFF, dtype=torch.uint8, device=device) for _ in range(shape.ranks)]
    for memory in memories:
        memory[: shape.returned] = 0
    pinned = torch.device(device).type == "cuda"
    found = []
    for rank in range(shape.ranks):
        alarm = torch.zeros(shape.ranks, dtype=torch.int32, pin_memory=pinned)
        places = [*(memory.data_ptr() for memory in memories), alarm.data_ptr()]
        addresses = torch.tensor(places, dtype=torch.int64, device=device)
        state = ExchangeBuffer.state_of(shape.ranks, device)
        found.append(ExchangeBuffer(shape, rank, memories[rank], addresses, state, alarm))
    return found


def placement_of(name: str, experts: int, ranks: int) -> ExpertPlacement:
    """contiguous, round_robin, or replicated: uneven, in no order, some experts on all ranks."""
    if name != "replicated":
        made: ExpertPlacement = getattr(ExpertPlacement, name)(experts, ranks)
        return made
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(5)).tolist()
    held = [order[rank::ranks] for rank in range(ranks)]
    for mine in held:
        mine += [expert for expert in (order[0], order[-1]) if expert not in mine]
    return ExpertPlacement(experts, tuple(map(tuple, held)))


def routing(
    tokens: int, top_k: int, experts: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(weights, ids): every third token names one expert in all slots, every fifth has a slot of no expert."""
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator).to(dtype)
    ids[::3] = ids[::3, :1]
    ids[::5, 0] = -1
    ids[1::7] = experts  # of no expert at all
    if dtype is torch.int64:
        ids[2::7, -1] = 2**32  # 0 in its low half
    return torch.rand(tokens, top_k, generator=generator), ids
