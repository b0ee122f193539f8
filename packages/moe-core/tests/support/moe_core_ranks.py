"""What ranks of the tests of process groups do; they import it by name."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import socket
import time
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from moe_core import MoEError
from moe_core.parallel.distributed import ParallelGroups, check_agreement
from torch.distributed.device_mesh import init_device_mesh

#: the GPUs that a process may see while it imports the program that it runs
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
#: sizes of groups that are none
NO_SIZES: tuple[dict[str, Any], ...] = (
    {"tp_size": "2"},
    {"tp_size": None},
    {"dp_size": "4"},
    {"all2all_backend": None},
)
#: what a rank holds until its process ends
_OPEN: list[socket.socket] = []


def refusal(call: Any) -> str:
    """The message of what ``call`` raises, which must be one of the project's errors."""
    try:
        call()
    except MoEError as error:
        return f"{type(error).__name__}: {error.message}"
    return "nothing"


def early(rank: int, port: int) -> bool:
    """Rank 0 ends at once; whether it is still there when another has taken its time."""
    if rank == 0:
        listening = socket.socket()
        listening.bind(("127.0.0.1", port))
        listening.listen()
        _OPEN.append(listening)
        return True
    time.sleep(0.5)
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def groups(rank: int) -> dict[str, Any]:
    """Who is in this rank's groups, made in three ways, and what is refused."""
    made = ParallelGroups.create(tp_size=2, dp_size=2)
    # a part of a mesh, mesh["ep", "tp"], would do too, and import a thousand modules on each rank
    mesh = ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")), timeout=5)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    # two layers of two ranks each
    pair = ParallelGroups.create(tp_size=2, ranks=[0, 1] if rank < 2 else [2, 3])
    total = torch.tensor([rank])
    dist.all_reduce(total, group=made.ep)
    gathered, scattered = torch.empty(4), torch.empty(1)
    made.among().all_gather("rows are gathered", gathered, torch.tensor([float(rank)]))
    made.among().reduce_scatter("rows are added", scattered, 10 * gathered)
    found: dict[str, Any] = {
        "parallel": made.parallel,
        "members": [made.among(group).members for group in (made.world, made.tp, made.ep, made.tokens)],
        "mesh": (mesh.among().members, mesh.among(mesh.tp).members, mesh.among(mesh.ep).members, mesh.timeout),
        "pair": (pair.among().members, pair.parallel.tp_rank, pair.tp is pair.world),
        "total": total.item(),
        "gathered": (gathered.tolist(), scattered.item()),
        "own": made.with_tokens(4).tokens is made.world,
        "shared": made.with_tokens(1).tokens is None,
        "copy": copy.deepcopy(made) is made,
        "gpus": (VISIBLE, torch.cuda.device_count()),
        "refused": [
            refusal(lambda: pickle.dumps(made)),
            refusal(lambda: ParallelGroups.create(tp_size=3)),
            refusal(lambda: ParallelGroups.create(dp_size=3)),
            *(refusal(lambda: ParallelGroups.create(timeout=limit)) for limit in (0, "60", nan, inf)),  # noqa: B023
            *(refusal(lambda: ParallelGroups.create(**sizes)) for sizes in NO_SIZES),  # noqa: B023
            refusal(lambda: made.with_tokens(None)),  # type: ignore[arg-type]
            refusal(lambda: ParallelGroups.create(ranks=[(rank + 1) % 4])),
            refusal(lambda: ParallelGroups.create(ranks=[1, 0, 2, 3])),
            *(refusal(lambda: ParallelGroups.create(ranks=ranks)) for ranks in (4, ["0"], [0, 1, 2, 4])),  # noqa: B023
            *(refusal(lambda: ParallelGroups.create(backend=name)) for name in ("x", "nccl")),  # noqa: B023
            refusal(lambda: ParallelGroups(made.parallel, made.world, made.world, made.ep)),
            refusal(lambda: ParallelGroups.from_mesh(other)),
            refusal(lambda: ParallelGroups.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep")))),
        ],
    }
    return found


def failing(rank: int, how: str) -> int:
    """Rank 1 raises, dies or hangs."""
    if rank == 1:
        time.sleep(1)  # the other is still being started, and would fail by itself
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
        # until the other has left the barrier, or its call has timed out
        time.sleep(4 if how == "hangs" else 0.5)
        os._exit(7)
    started = time.monotonic()

    def call() -> None:
        made.among().reduce_scatter("sums are added", torch.ones(2), torch.ones(4))

    return refusal(call), time.monotonic() - started


def late(rank: int) -> str:
    """Rank 1 makes no groups: what the other is told."""
    if rank == 1:
        time.sleep(3)
        return ""
    return refusal(lambda: ParallelGroups.create(timeout=1))


def disagreeing(rank: int) -> list[str]:
    """What ranks are told that were given other sizes or other facts."""
    made = ParallelGroups.create(timeout=10)
    odd = {"top_k": "4" if rank == 2 else "2", "placement": f"{'x' * 300}{rank % 2}", f"only {rank}": "1"}
    return [
        refusal(lambda: ParallelGroups.create(tp_size=2 if rank == 3 else 1, timeout=10)),
        refusal(lambda: ParallelGroups.create(tp_size=3 if rank == 0 else 4, timeout=10)),
        refusal(lambda: check_agreement(made.among(), odd)),
        refusal(lambda: check_agreement(made.among(), {"of all": "1", f"of {rank}": str(rank)})),
    ]
