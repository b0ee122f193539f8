"""Move experts between ranks while a layer is in use, without reading a checkpoint again.

Experts are transferred in the layout of the layer's kernel. They first arrive in staging buffers next to the weights
(:meth:`ExpertMover.stage`, communicates between ranks), then take their slots (:meth:`ExpertMover.commit`, local to
this rank). Until the commit the old placement is valid, and a failure leaves it so. Slots are overwritten in place, so
captured CUDA graphs remain valid::

    mover = ExpertMover(kernel, groups, placement)           # once, on all ranks
    for step in mover.steps(plan.placement, max_staged=2):   # two experts of memory on each rank
        mover.stage(step)                                    # may run in a thread, with a separate stream and groups
        mover.commit()                                       # all ranks, between the same two calls of the layer
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.errors import CommunicationError, ConfigError, MoEError, TensorError, check_dtype, check_shape
from moe_core.parallel.checks import check_placed
from moe_core.parallel.distributed import ParallelGroups
from moe_core.parallel.distributed.agreement import check_agreement
from moe_core.parallel.placement.moves import placement_steps
from moe_core.parallel.placement.placement import ExpertPlacement, check_placement
from moe_core.runtime.kernel import FusedMoEKernel
from moe_core.spec.weights import KernelWeights, check_writable


@dataclass(frozen=True, eq=False)
class _Staged:
    """Experts that have arrived for a placement but have not been committed.

    Attributes:
        placement: Placement that they belong to.
        arrived: Bytes of each tensor's slice, by slot.
        ready: Event after which they are complete, on a GPU.
    """

    placement: ExpertPlacement
    arrived: Mapping[int, Mapping[str, Tensor]]
    ready: torch.cuda.Event | None


class ExpertMover:
    """Moves the experts of one layer between its expert-parallel ranks.

    Every rank creates one at the same time.

    Args:
        kernel: Kernel of the layer. It must own its weights, which are overwritten.
        groups: Groups of the layer, or others with the same ranks, so that weights travel alongside the layer's own
            calls.
        placement: Placement in use. If the kernel's prepare/finalize has one (``maps_experts``), it must be equal, and
            is updated by commits.
        expert_map: Expert map of the layer's calls, int32 ``[E]``, which is overwritten too. Required if
            prepare/finalize has no placement.

    Raises:
        ConfigError: The kernels of some ranks (listed) use different expert layouts, or differ in tensors that all
            experts share, such as a common scale; or the arguments do not fit.
        TensorError: The weights cannot be overwritten.
    """

    def __init__(
        self,
        kernel: FusedMoEKernel,
        groups: ParallelGroups,
        placement: ExpertPlacement,
        *,
        expert_map: Tensor | None = None,
    ) -> None:
        check_placed(groups, placement)
        if not isinstance(kernel, FusedMoEKernel):
            raise ConfigError(f"kernel is {type(kernel).__name__}, expected a FusedMoEKernel: layer.kernel of a layer")
        if expert_map is not None:
            check_shape("expert_map", expert_map, (kernel.config.num_experts,))
            check_dtype("expert_map", expert_map, (torch.int32,))
        self._ranks = groups.among(groups.ep)
        self._size, self._rank = groups.parallel.ep_size, groups.parallel.ep_rank
        self._movement = kernel.prepare_finalize
        self._expert_map = expert_map
        self._placement = placement
        self._staged: _Staged | None = None
        self._written: torch.cuda.Event | None = None
        self._device = kernel.weights.device
        held = kernel.config.local_experts
        self._own = per_expert(kernel.weights, held)
        self._check(kernel, placement, held)
        self._agree(kernel.weights)
        if expert_map is None and self._size > 1 and not self._mapped:
            raise ConfigError(
                "calls of this kernel pass an expert map, which must follow the experts: pass it as expert_map= "
                "(layer.expert_map of a layer)"
            )

    @property
    def _mapped(self) -> bool:
        """Whether the kernel's prepare/finalize has the placement of experts."""
        return self._movement is not None and self._movement.maps_experts

    @property
    def placement(self) -> ExpertPlacement:
        """The placement in use: that of the last commit."""
        return self._placement

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert on this rank: the size of a staging buffer."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self._own.values())

    def steps(self, new: ExpertPlacement, *, max_staged: int | None = 1) -> tuple[ExpertPlacement, ...]:
        """Split a change of placement into steps to stage and commit one after another.

        See :func:`~moe_core.parallel.placement.moves.placement_steps`.

        Args:
            new: Placement to reach.
            max_staged: Number of experts that a rank can stage at a time. None for no limit, which gives one step.

        Returns:
            Placements of the steps; the last has the experts of ``new`` on each rank.
        """
        check_placement(new)
        return placement_steps(self._placement, new, max_staged)

    @torch.no_grad()
    def stage(self, new: ExpertPlacement) -> None:
        """Transfer the experts that change ranks into staging buffers next to the weights.

        Every rank calls it at the same time; the layer may be in use. It returns when all ranks have received their
        experts. After an error nothing is staged and the weights are unchanged.

        Args:
            new: Placement to stage.

        Raises:
            ConfigError: The placement does not fit, or ranks passed different placements.
            CommunicationError: A rank could not participate, or did not answer within the timeout of the groups.
        """
        self._staged = None
        check_placement(new)
        self._check_fits(new)
        moves = list(_moves(self._placement, new))
        arrived: dict[int, dict[str, Tensor]] = {}
        failed: Exception | None = None
        if self._written is not None:  # data to send may come from the last commit, on another stream
            self._written.wait()
        try:
            for _, local, _, _ in (move for move in moves if move[0] == self._rank):
                arrived[local] = {
                    name: torch.empty(tensor[0].numel() * tensor.element_size(), dtype=torch.uint8, device=self._device)
                    for name, tensor in self._own.items()
                }
        except RuntimeError as error:  # usually out of memory; the others must not wait for this rank
            failed = error
        self._all_are(failed, "has no room for the experts that come", zlib.crc32(str(new.ranks).encode()))
        try:
            self._exchange(moves, arrived)
        except MoEError:
            raise
        except Exception as error:
            failed = error
        self._all_are(failed, "could not exchange experts")
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.current_stream().record_event()
        self._staged = _Staged(new, arrived, ready)

    @torch.no_grad()
    def commit(self) -> None:
        """Copy the staged experts into their slots, and make later calls use them.

        On a GPU the copies run on the current stream. There is no communication. All ranks must commit between the same
        two calls of the layer.

        Raises:
            ConfigError: Nothing is staged.
        """
        staged = self._staged
        if staged is None:
            raise ConfigError("no experts are staged: call stage first, on all ranks")
        if self._movement is not None and self._movement.maps_experts:
            self._movement.move_experts(staged.placement)
        if staged.ready is not None:
            staged.ready.wait()
        for local, parts in staged.arrived.items():
            for name, data in parts.items():
                slot = self._own[name][local]
                slot.copy_(data.view(slot.dtype).view(slot.shape))
                if data.is_cuda:
                    data.record_stream(torch.cuda.current_stream())
        if self._expert_map is not None:
            self._expert_map.copy_(staged.placement.expert_map(self._rank))
        if staged.ready is not None:
            self._written = torch.cuda.current_stream().record_event()
        self._placement = staged.placement
        self._staged = None

    def discard(self) -> None:
        """Drop what is staged; the placement is unchanged."""
        self._staged = None

    def _exchange(
        self, moves: list[tuple[int, int, int, tuple[int, int]]], arrived: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        """Send and receive all tensors of the experts; both ranks of a pair use the same order."""
        members, group = self._ranks.members, self._ranks.group
        calls: list[Any] = []
        for rank, local, _, (source, place) in moves:
            for name, tensor in self._own.items():
                if source == self._rank:
                    # Copies only if the slice is not contiguous.
                    part = tensor[place].reshape(-1).view(torch.uint8)
                    if rank == self._rank:
                        arrived[local][name].copy_(part)
                    else:
                        calls.append(dist.P2POp(dist.isend, part, members[rank], group))
                elif rank == self._rank:
                    calls.append(dist.P2POp(dist.irecv, arrived[local][name], members[source], group))
        with self._ranks.communicating("experts are moved"):
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()

    def _all_are(self, failed: Exception | None, what: str, stamp: int = 0) -> None:
        """Raise CommunicationError that lists the failed ranks; the local error is its cause.

        Args:
            failed: Error of this rank, if any.
            what: Description of the failure, for the message.
            stamp: Checksum of the request; ConfigError if ranks differ in it.
        """
        clause = "ranks agree about the experts that are moved"
        told = torch.zeros(2 * self._size, dtype=torch.int64, device=self._ranks.device)
        own = torch.tensor([int(failed is not None), stamp], dtype=torch.int64, device=self._ranks.device)
        self._ranks.begin(clause, dist.all_gather_into_tensor, told, own).wait()
        numbers = self._ranks.numbers(told, clause)
        others = [rank for rank, found in enumerate(numbers[1::2]) if found != stamp]
        if others:
            raise ConfigError(
                f"ep_rank {', '.join(map(str, others))} received another placement than ep_rank {self._rank}; the "
                "placement is unchanged"
            )
        bad = [rank for rank, flag in enumerate(numbers[::2]) if flag]
        if bad:
            text = f"ep_rank {', '.join(map(str, bad))} {what}; the placement stays as it was"
            raise CommunicationError(text, details="" if failed is None else str(failed)) from failed

    def _check(self, kernel: FusedMoEKernel, placement: ExpertPlacement, held: int) -> None:
        if (placement.num_experts, placement.ep_size) != (kernel.config.num_experts, self._size):
            raise ConfigError(
                f"the placement is of {placement.num_experts} experts on {placement.ep_size} ranks, the layer has "
                f"{kernel.config.num_experts} on {self._size}"
            )
        if len(placement.ranks[self._rank]) != held:
            raise ConfigError(
                f"the placement has {len(placement.ranks[self._rank])} experts on ep_rank {self._rank}, the layer has "
                f"{held} there"
            )
        if self._movement is not None and self._mapped:
            used = self._movement.placement or ExpertPlacement.contiguous(placement.num_experts, placement.ep_size)
            if used != placement:
                raise ConfigError(f"the placement is {placement}, that of the layer's kernel {used}")
        if kernel.lora is not None:
            raise ConfigError("experts of a layer with LoRA adapters cannot be moved")

    def _check_fits(self, new: ExpertPlacement) -> None:
        new.aligned(self._placement)
        if new.num_experts != self._placement.num_experts:
            raise ConfigError(
                f"the new placement is of {new.num_experts} experts, the layer has {self._placement.num_experts}"
            )
        if new.has_replicas and not self._mapped:
            raise ConfigError(
                "the layer has an expert map, which cannot select among an expert's replicas: create it with "
                "groups= and placement="
            )

    def _agree(self, weights: KernelWeights) -> None:
        """Raise ConfigError unless ranks agree on per-expert tensors, and on values of shared ones."""
        facts = {"the placement of experts": str(self._placement), "the tensors of kernels": ""}
        for name, tensor in weights.tensors():
            facts["the tensors of kernels"] += f"{name} "
            own = f"{list(tensor.shape[1:])} {tensor.dtype} per expert"
            facts[f"{name} of kernels"] = own if name in self._own else _digest(tensor)
        check_agreement(self._ranks, facts)


def per_expert(weights: KernelWeights, held: int) -> dict[str, Tensor]:
    """Return the tensors that have a slice per local expert; each memory is listed once.

    All other tensors are shared by the experts.

    Args:
        weights: Weights of a layer.
        held: Number of local experts.

    Returns:
        Tensors by name.

    Raises:
        TensorError: A tensor cannot be overwritten.
    """
    found: dict[str, Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in weights.tensors():
        if not tensor.dim() or tensor.shape[0] != held or (held > 1 and tensor.stride(0) == 0):
            continue
        check_writable(name, tensor)
        if tensor.is_meta:
            raise TensorError(f"{name} is on the meta device: it has no values to move")
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in seen:
            found[name] = tensor
        seen.add(place)
    return found


def _moves(old: ExpertPlacement, new: ExpertPlacement) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield (rank, slot, expert, source) for each slot that changes.

    The source is the (rank, slot) of the replica that provides the expert.
    """
    asked: dict[int, int] = {}
    for rank, (held, wanted) in enumerate(zip(old.ranks, new.ranks, strict=True)):
        for local, (before, expert) in enumerate(zip(held, wanted, strict=True)):
            if before == expert:
                continue
            here = held.index(expert) if expert in held else None
            if here is not None:
                yield rank, local, expert, (rank, here)
                continue
            # Replicas provide an expert in turn, to balance the transfers.
            replicas = old.replicas[expert]
            yield rank, local, expert, replicas[asked.get(expert, 0) % len(replicas)]
            asked[expert] = asked.get(expert, 0) + 1


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()[:12]}"
