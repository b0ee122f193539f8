"""The process groups of a layer's ranks.

Rank ``ep_rank * tp_size + tp_rank`` of a layer holds columns ``tp_rank`` of the experts of ``ep_rank``. Neighbors in
this order are tensor-parallel ranks of each other and belong on one host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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

#: Timeout after which communication that has not completed is an error.
DEFAULT_TIMEOUT = timedelta(minutes=5)

#: Extra time before NCCL's watchdog, which ends the process, checks a call: errors that can be handled come first.
_WATCHDOG_GRACE = timedelta(seconds=30)


@dataclass(frozen=True, eq=False)
class ParallelGroups(SharedByCopies):
    """The process groups of one rank of a layer.

    Created by :meth:`create` or :meth:`from_mesh`, or from an engine's own groups. Groups of one rank are not
    communicated with. Copies of a layer share the groups; they cannot be pickled.

    Attributes:
        parallel: Sizes, and the numbers of this rank.
        world: All ranks of the layer, in their order.
        tp: Tensor-parallel ranks of this expert-parallel rank, by ``tp_rank``.
        ep: Expert-parallel ranks of this tensor-parallel rank, by ``ep_rank``.
        timeout: Timeout that the groups were created with, after which communication raises CommunicationError. NCCL
            calls are checked where the host waits for them (:class:`~moe_core.parallel.distributed.Communicator`).
            Where it never waits, NCCL's watchdog ends the process half a minute later.

    Raises:
        ConfigError: A group has another size, or this process has another rank in it.
    """

    parallel: FusedMoEParallelConfig
    world: ProcessGroup
    tp: ProcessGroup
    ep: ProcessGroup
    timeout: timedelta = DEFAULT_TIMEOUT
    _communicators: dict[ProcessGroup, Communicator] = field(default_factory=dict, init=False, repr=False)

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
        """Create the groups within torch's default process group.

        ``init_process_group`` must have been called. Every rank of the layer calls this at the same time.

        Args:
            tp_size: Number of tensor-parallel ranks.
            ep_size: Number of expert-parallel ranks. Default: all ranks divided by ``tp_size``.
            dp_size: Number of ranks, or groups of ranks, that bring separate tokens.
            all2all_backend: Name of the prepare/finalize class that moves tokens.
            ranks: The layer's ranks in the default group, ascending. Default: all.
            timeout: Timeout in seconds or as a timedelta. Default: 5 minutes.
            backend: Backend of torch.distributed. Default: that of the default group.

        Returns:
            The groups.

        Raises:
            ConfigError: The sizes do not fit the number of ranks.
            CommunicationError: A rank is missing.
        """
        if not dist.is_initialized():
            raise ConfigError("torch.distributed has no process group: call init_process_group first, or use torchrun")
        size, me = dist.get_world_size(), dist.get_rank()
        members = list(range(size)) if ranks is None else _within("ranks", ranks, size)
        if members != sorted(set(members)):
            raise ConfigError(
                f"the layer's ranks are {members}, expected ascending ones, as torch's groups have them: "
                "tensor-parallel neighbors are adjacent, so a mesh is (ep, tp)"
            )
        if me not in members:
            raise ConfigError(f"this process is rank {me}, expected one of the layer's ranks {members}")
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
            if isinstance(made, int):  # torch's code for a rank outside the group
                raise ConfigError(f"rank {me} is not in its group {list(which)}")
            return made

        with Communicating("the process groups are made", lambda: members, limit):
            world = group(members)
            # This must come before anything that one rank alone may reject, and before groups of other sizes wait for
            # each other.
            sizes = {"tp_size": tp_size, "ep_size": ep_size, "dp_size": dp_size, "all2all_backend": all2all_backend}
            check_agreement(Communicator(world, limit), {name: str(value) for name, value in sizes.items()})
            parallel = FusedMoEParallelConfig.of_rank(
                members.index(me), tp_size=tp_size, ep_size=ep_size, dp_size=dp_size, all2all_backend=all2all_backend
            )
            if parallel.world_size != len(members):
                raise ConfigError(
                    f"tp_size {tp_size} x ep_size {ep_size} = {parallel.world_size} ranks, but there are {len(members)}"
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
        """Create the groups over a ``DeviceMesh`` with dimensions ``ep``, ``tp``, or one of them.

        Pass a sub-mesh of a mesh with more dimensions: ``mesh["ep", "tp"]``.

        Args:
            mesh: The mesh.
            tp: Name of the tensor-parallel dimension.
            ep: Name of the expert-parallel dimension.
            dp_size: As in :meth:`create`.
            all2all_backend: As in :meth:`create`.
            timeout: As in :meth:`create`.
            backend: As in :meth:`create`.

        Returns:
            The groups.

        Raises:
            ConfigError: The mesh has other dimensions, or as in :meth:`create`.
            CommunicationError: A rank is missing.
        """
        names = mesh.mesh_dim_names or ()
        if not names or set(names) - {tp, ep}:
            raise ConfigError(
                f"the mesh has dimensions {list(names)}, expected {ep!r}, {tp!r} or one of them: pass a submesh, "
                f"mesh[{ep!r}, {tp!r}]"
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
        """Return the same groups with another token sharing or all2all backend.

        Args:
            dp_size: As in :meth:`create`.
            all2all_backend: As in :meth:`create`. Default: unchanged.

        Returns:
            The groups.
        """
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
        """The group whose ranks each bring separate tokens; None if all ranks have the same tokens.

        This rank's position in it is ``dp_rank``. It is ``ep`` if tensor-parallel ranks share tokens, else ``world``.
        """
        sharing = self.parallel.token_sharing
        return {TokenSharing.ALL: None, TokenSharing.EP_RANK: self.ep, TokenSharing.NONE: self.world}[sharing]

    def members(self, group: ProcessGroup | None = None) -> list[int]:
        """Return the ranks of a group as ranks of torch's default process group, in its order.

        Args:
            group: The group. Default: all ranks of the layer.

        Returns:
            The ranks.
        """
        return list(dist.get_process_group_ranks(self.world if group is None else group))

    def among(self, group: ProcessGroup | None = None) -> Communicator:
        """Return the communicator of a group.

        Args:
            group: The group. Default: all ranks of the layer.

        Returns:
            The communicator, with the timeout of these groups.
        """
        group = self.world if group is None else group
        found = self._communicators.get(group)
        if found is None:
            found = self._communicators[group] = Communicator(group, self.timeout)
        return found

    def __reduce__(self) -> Any:
        raise ConfigError(
            "process groups can't be pickled, nor a layer that communicates: pickle the layer without groups, and give "
            "it new ones where it is loaded"
        )


def as_timeout(timeout: timedelta | float | None) -> timedelta:
    """Convert a timeout argument to a timedelta.

    Args:
        timeout: Seconds, a timedelta, or None for the default.

    Returns:
        The timeout.

    Raises:
        ConfigError: It is not positive.
    """
    if timeout is None:
        return DEFAULT_TIMEOUT
    try:
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (TypeError, ValueError, OverflowError):  # strings, NaN, values too large for a timedelta
        limit = timedelta(0)
    if limit <= timedelta(0):
        raise ConfigError(f"timeout is {timeout!r}, expected a positive number of seconds")
    return limit


def _within(name: str, ranks: Sequence[int], size: int) -> list[int]:
    """Convert ``ranks`` to integers; raise ConfigError unless they are in a group of ``size``."""
    try:
        found = [operator.index(rank) for rank in ranks]
    except TypeError:
        found = [-1]
    if not all(0 <= rank < size for rank in found):
        raise ConfigError(f"{name} is {ranks!r}, expected ranks of torch's default process group: 0 to {size - 1}")
    return found


def _check_backend(backend: str) -> None:
    """Raise ConfigError for an unavailable backend: "gloo", or a list "cpu:gloo,cuda:nccl"."""
    names = [part.rpartition(":")[2].lower() for part in str(backend).split(",")]
    unknown = [name for name in names if not dist.is_backend_available(name)]
    if unknown:
        raise ConfigError(f"backend is {backend!r}, and torch has no {unknown[0]!r} here, expected gloo or nccl")
    if "nccl" in names and not torch.cuda.is_available():
        raise ConfigError(f"backend is {backend!r}, and torch sees no GPU here, which nccl needs, expected gloo")
