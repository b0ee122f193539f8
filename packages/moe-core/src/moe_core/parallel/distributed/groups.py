"""The process groups of a layer's ranks.

Rank ``ep_rank * tp_size + tp_rank`` of a layer holds columns ``tp_rank`` of the experts of ``ep_rank``; neighbours in
that order are tensor-parallel ranks of each other, which belong on one host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_core.errors import ConfigError
from moe_core.parallel.distributed.agreement import check_agreement
from moe_core.parallel.distributed.communication import Communicating, Communicator, SharedByCopies
from moe_core.spec.config import FusedMoEParallelConfig, TokenSharing, whole_number

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

#: after which a call between ranks that does not end is an error
DEFAULT_TIMEOUT = timedelta(minutes=5)

#: how much later the watchdog of NCCL, which ends the process, looks at a call: errors that can be handled come first
_WATCHDOG_GRACE = timedelta(seconds=30)


@dataclass(frozen=True, eq=False)
class ParallelGroups(SharedByCopies):
    """The process groups of one rank of a layer; made by :meth:`create` or :meth:`from_mesh`, or of an engine's own.

    - ``parallel``: sizes, and this rank's numbers
    - ``world``: all ranks of the layer in their order
    - ``tp``: this expert-parallel rank's tensor-parallel ranks, by ``tp_rank``
    - ``ep``: this tensor-parallel rank's expert-parallel ranks, by ``ep_rank``
    - ``timeout``: after which a call between ranks raises CommunicationError; it was set when the groups were made.
      NCCL's calls are looked at where the host waits for them (:class:`~moe_core.parallel.distributed.Communicator`);
      where it never does, NCCL's watchdog ends the process half a minute later.

    Groups of one rank are not communicated with.  Copies of a layer share the groups; they are not pickled.
    Raises ConfigError for groups of other sizes, and where this process has another rank in them.
    """

    parallel: FusedMoEParallelConfig
    world: ProcessGroup
    tp: ProcessGroup
    ep: ProcessGroup
    timeout: timedelta = DEFAULT_TIMEOUT

    def __post_init__(self) -> None:
        parallel = self.parallel
        for name, size, rank in (
            ("world", parallel.world_size, parallel.rank),
            ("tp", parallel.tp_size, parallel.tp_rank),
            ("ep", parallel.ep_size, parallel.ep_rank),
        ):
            group = getattr(self, name)
            found = dist.get_world_size(group), dist.get_rank(group)
            if found != (size, rank):
                raise ConfigError(
                    f"the {name} group has {found[0]} ranks, of which this process is rank {found[1]}; expected "
                    f"{size} ranks and rank {rank} for {parallel}"
                )
        _ = parallel.token_sharing

    @staticmethod
    def create(
        *,
        tp_size: int = 1,
        ep_size: int | None = None,
        dp_size: int = 1,
        all2all_backend: str = "allgather_reducescatter",
        ranks: Sequence[int] | None = None,
        timeout: timedelta | float | None = None,
        backend: str | None = None,
    ) -> ParallelGroups:
        """New groups within torch's default process group, whose ``init_process_group`` comes first.

        ``ep_size``: default: all ranks divided by ``tp_size``; ``ranks``: the layer's, as ranks of the default group,
        ascending, by default all; ``timeout`` in seconds or as a timedelta, default 5 minutes; ``backend``:
        default that of the default group.  Every rank of the layer calls this at the same time.
        Raises ConfigError for sizes that don't fit the number of ranks; CommunicationError where a rank is missing.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group: call init_process_group first, or use torchrun")
        size, me = dist.get_world_size(), dist.get_rank()
        members = list(range(size)) if ranks is None else _within("ranks", ranks, size)
        if members != sorted(set(members)):
            raise ConfigError(
                f"the layer's ranks are {members}, expected ascending ones, as torch's groups have them: "
                "tensor-parallel neighbours are adjacent, so a mesh is (ep, tp)"
            )
        if me not in members:
            raise ConfigError(f"this process is rank {me}, which is none of the layer's ranks {members}")
        if ep_size is None:
            ep_size = max(len(members) // whole_number("tp_size", tp_size), 1)
        limit = as_timeout(timeout)
        if backend is not None:
            _check_backend(backend)
        nccl = "nccl" in (backend or dist.get_backend())

        def group(which: Sequence[int]) -> ProcessGroup:
            made = dist.new_group(
                list(which),
                timeout=limit + _WATCHDOG_GRACE if nccl else limit,
                backend=backend,
                use_local_synchronization=True,
            )
            if isinstance(made, int):  # torch's number for a rank that is not in the group
                raise ConfigError(f"rank {me} is not in its group {list(which)}")
            return made

        with Communicating("the process groups are made", lambda: members, limit):
            world = group(members)
            # before anything that a rank alone may refuse, and before groups of other sizes wait for each other
            sizes = {"tp_size": tp_size, "ep_size": ep_size, "dp_size": dp_size, "all2all_backend": all2all_backend}
            check_agreement(Communicator(world, limit), {name: str(value) for name, value in sizes.items()})
            parallel = FusedMoEParallelConfig.of_rank(
                members.index(me), tp_size=tp_size, ep_size=ep_size, dp_size=dp_size, all2all_backend=all2all_backend
            )
            if parallel.world_size != len(members):
                raise ConfigError(
                    f"tp_size {tp_size} x ep_size {ep_size} = {parallel.world_size} ranks, there are {len(members)}"
                )
            _ = parallel.token_sharing
            first = parallel.ep_rank * tp_size
            tp = world if ep_size == 1 else group(members[first : first + tp_size])
            ep = world if tp_size == 1 else group(members[parallel.tp_rank :: tp_size])
        return ParallelGroups(parallel, world, tp, ep, limit)

    @staticmethod
    def from_mesh(
        mesh: DeviceMesh,
        *,
        tp: str = "tp",
        ep: str = "ep",
        dp_size: int = 1,
        all2all_backend: str = "allgather_reducescatter",
        timeout: timedelta | float | None = None,
        backend: str | None = None,
    ) -> ParallelGroups:
        """New groups over the ranks of a ``DeviceMesh`` whose dimensions are called ``ep``, ``tp``, or one of them.

        Of a mesh with more dimensions give the part: ``mesh["ep", "tp"]``.  Arguments otherwise as of :meth:`create`.
        """
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - {tp, ep}:
            raise ConfigError(
                f"the mesh has dimensions {list(names)}, expected {ep!r}, {tp!r} or one of them: "
                f"give the part of it, mesh[{ep!r}, {tp!r}]"
            )
        order = [names.index(name) for name in (ep, tp) if name in names]
        sizes = {name: mesh.size(names.index(name)) for name in names}
        return ParallelGroups.create(
            tp_size=sizes.get(tp, 1),
            ep_size=sizes.get(ep, 1),
            dp_size=dp_size,
            all2all_backend=all2all_backend,
            ranks=mesh.mesh.permute(order).flatten().tolist(),
            timeout=timeout,
            backend=backend,
        )

    def with_tokens(self, dp_size: int, all2all_backend: str | None = None) -> ParallelGroups:
        """The same groups for a layer whose tokens are shared otherwise, or travel by another backend."""
        old = self.parallel
        parallel = FusedMoEParallelConfig.of_rank(
            old.rank,
            tp_size=old.tp_size,
            ep_size=old.ep_size,
            dp_size=dp_size,
            all2all_backend=all2all_backend or old.all2all_backend,
        )
        return replace(self, parallel=parallel)

    @property
    def tokens(self) -> ProcessGroup | None:
        """The ranks among which each has tokens of its own, this one in it by ``dp_rank``; None where all are shared.

        ``ep`` where tensor-parallel ranks share theirs, else ``world``.
        """
        sharing = self.parallel.token_sharing
        return {TokenSharing.ALL: None, TokenSharing.EP_RANK: self.ep, TokenSharing.NONE: self.world}[sharing]

    def members(self, group: ProcessGroup | None = None) -> list[int]:
        """Ranks of torch's default process group that are in ``group`` (default: the layer's), in its order."""
        return list(dist.get_process_group_ranks(self.world if group is None else group))

    def among(self, group: ProcessGroup | None = None) -> Communicator:
        """What calls among the ranks of ``group`` (default: all of the layer) go through."""
        return Communicator(self.world if group is None else group, self.timeout)

    def __reduce__(self) -> Any:
        raise ConfigError(
            "process groups can't be pickled, nor a layer that communicates: pickle the layer without groups, and give "
            "it new ones where it is loaded"
        )


def as_timeout(timeout: timedelta | float | None) -> timedelta:
    """A time-out from what users pass.  Raises ConfigError unless it is positive."""
    if timeout is None:
        return DEFAULT_TIMEOUT
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):  # text, nan, more than a timedelta holds
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise ConfigError(f"timeout is {timeout!r}, expected a positive number of seconds")
    return limit


def _within(name: str, ranks: Sequence[int], size: int) -> list[int]:
    """``ranks`` as plain integers.  Raises ConfigError unless these are ranks of a group of ``size``."""
    try:
        found = [operator.index(rank) for rank in ranks]
    except TypeError:
        found = [-1]
    if not all(0 <= rank < size for rank in found):
        raise ConfigError(f"{name} is {ranks!r}, expected ranks of torch's default process group: 0 to {size - 1}")
    return found


def _check_backend(backend: str) -> None:
    """ConfigError for what torch can't communicate with here: ``backend`` is "gloo", or "cpu:gloo,cuda:nccl"."""
    names = [part.rpartition(":")[2].lower() for part in str(backend).split(",")]
    unknown = [name for name in names if not dist.is_backend_available(name)]
    if unknown:
        raise ConfigError(f"backend is {backend!r}, and torch has no {unknown[0]!r} here, expected gloo or nccl")
    if "nccl" in names and not torch.cuda.is_available():
        raise ConfigError(f"backend is {backend!r}, and torch sees no GPU here, which nccl needs, expected gloo")
