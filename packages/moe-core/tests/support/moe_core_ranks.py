"""What ranks of the tests of process groups do; they import it by name."""

from __future__ import annotations

import copy
import os
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from moe_core import MoEError
from moe_core.distributed import ParallelGroups
from torch.distributed.device_mesh import init_device_mesh


def refusal(call: Any) -> str:
    """The message of what ``call`` raises, which must be one of the project's errors."""
    try:
        call()
    except MoEError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def groups(rank: int) -> dict[str, Any]:
    """Who is in this rank's groups, made in three ways, and what is refused."""
    made = ParallelGroups.create(tp_size=2, dp_size=2)
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "ep", "tp"))
    mesh = ParallelGroups.from_mesh(whole["ep", "tp"], timeout=5)
    # two layers of two ranks each
    pair = ParallelGroups.create(tp_size=2, ranks=[0, 1] if rank < 2 else [2, 3])
    total = torch.tensor([rank])
    dist.all_reduce(total, group=made.ep)
    found: dict[str, Any] = {
        "parallel": made.parallel,
        "members": [made.members(group) for group in (made.world, made.tp, made.ep, made.tokens)],
        "mesh": (mesh.members(), mesh.members(mesh.tp), mesh.members(mesh.ep), mesh.timeout),
        "pair": (pair.members(), pair.parallel.tp_rank, pair.tp is pair.world),
        "total": total.item(),
        "own": made.with_tokens(4).tokens is made.world,
        "shared": made.with_tokens(1).tokens is None,
        "copy": copy.deepcopy(made) is made,
        "refused": [
            refusal(lambda: pickle.dumps(made)),
            refusal(lambda: ParallelGroups.create(tp_size=3)),
            refusal(lambda: ParallelGroups.create(dp_size=3)),
            refusal(lambda: ParallelGroups.create(timeout=0)),
            refusal(lambda: ParallelGroups.create(ranks=[(rank + 1) % 4])),
            refusal(lambda: ParallelGroups.create(ranks=[1, 0, 2, 3])),
            refusal(lambda: ParallelGroups(made.parallel, made.world, made.world, made.ep)),
            refusal(lambda: ParallelGroups.from_mesh(whole)),
            refusal(lambda: ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep")))),
        ],
    }
    return found


def failing(rank: int, how: str) -> int:
    """Rank 1 raises, dies or hangs."""
    if rank == 1:
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            time.sleep(60)
        return 1 // 0
    return rank


def silent(rank: int, how: str) -> tuple[str, float] | None:
    """Rank 1 dies, or ends without taking part after a while: what the other is told, and after how many seconds."""
    made = ParallelGroups.create(timeout=1)
    dist.barrier()
    if rank == 1:
        if how == "hangs":
            time.sleep(4)
        os._exit(7)
    started = time.monotonic()

    def call() -> None:
        with made.communicating("sums are added", made.world):
            dist.all_reduce(torch.ones(4), group=made.world)

    return refusal(call), time.monotonic() - started
