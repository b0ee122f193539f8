"""Placements as device tensors that map tokens to replicas of their experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core.errors import ConfigError, TensorError, check_dtype, check_instance, check_shape
from moe_core.parallel.placement.placement import ExpertPlacement
from moe_core.spec.config import whole_number
from moe_core.spec.device import as_torch_device


@dataclass(frozen=True, eq=False)
class ReplicaTables:
    """A placement as two tensors, for kernels that dispatch tokens.

    Token ``t`` that chose expert ``e`` goes to ``slots[e, t % counts[e]]``, where ``t`` is the row of ``topk_ids`` plus
    an offset that a rank may choose. Replicas thus share the tokens of an expert evenly, and every call makes the same
    choice. Ranks that must agree (each sees all tokens) use the same rows and offset 0. Ranks that dispatch separate
    tokens use their own rank as offset, so that single tokens of many ranks do not all go to one replica.

    R and ``stride`` are capacities: :meth:`copy_` stores another placement in the same memory, which captured CUDA
    graphs keep reading.

    Attributes:
        slots: int32 ``[E, R]``, contiguous: ``rank * stride + local index`` of each replica of an expert. An expert
            with fewer than R replicas repeats them from its first, so every entry is valid.
        counts: int32 ``[E]``: number of replicas of each expert, 1..R.
        stride: Largest number of experts that a rank can hold.
    """

    slots: Tensor
    counts: Tensor
    stride: int

    @staticmethod
    def of(
        placement: ExpertPlacement,
        device: torch.device | str | None = None,
        *,
        max_replicas: int | None = None,
        stride: int | None = None,
    ) -> ReplicaTables:
        """Create the tables of a placement.

        Args:
            placement: The placement.
            device: Device of the tables.
            max_replicas: Capacity R. Default: the number of ranks.
            stride: Capacity of experts per rank. Default: the largest number in ``placement``.

        Returns:
            The tables.

        Raises:
            ConfigError: The placement exceeds a capacity.
        """
        check_instance("placement", placement, ExpertPlacement)
        room = placement.ep_size if max_replicas is None else whole_number("max_replicas", max_replicas)
        most = placement.max_local_experts if stride is None else whole_number("stride", stride)
        where = as_torch_device(device)
        tables = ReplicaTables(
            torch.empty((placement.num_experts, room), dtype=torch.int32, device=where),
            torch.empty((placement.num_experts,), dtype=torch.int32, device=where),
            most,
        )
        tables.copy_(placement)
        return tables

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.slots.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with their names."""
        yield "slots", self.slots
        yield "counts", self.counts

    def copy_(self, placement: ExpertPlacement) -> None:
        """Overwrite the tables in place with those of another placement.

        Args:
            placement: The placement.

        Raises:
            ConfigError: The number of experts differs, or the placement exceeds a capacity. The tables are untouched.
        """
        slots, counts = self._rows(placement)
        self.slots.copy_(slots)
        self.counts.copy_(counts)

    def _rows(self, placement: ExpertPlacement) -> tuple[Tensor, Tensor]:
        """Slots and counts of a placement that fits, on the CPU."""
        check_instance("placement", placement, ExpertPlacement)
        experts, room = self.slots.shape
        if placement.num_experts != experts:
            raise ConfigError(f"the placement has {placement.num_experts} experts, expected {experts} as in the tables")
        for what, needed, there in (
            ("replicas of an expert", placement.max_replicas, room),
            ("experts on a rank", placement.max_local_experts, self.stride),
        ):
            if needed > there:
                raise ConfigError(f"the placement has up to {needed} {what}, but the tables have a capacity of {there}")
        flat = [[rank * self.stride + local for rank, local in places] for places in placement.replicas]
        rows = [[row[replica % len(row)] for replica in range(room)] for row in flat]
        counts = torch.tensor([len(row) for row in flat], dtype=torch.int32, device="cpu")
        return torch.tensor(rows, dtype=torch.int32, device="cpu"), counts

    def choose(self, topk_ids: Tensor, *, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Choose the replicas that process tokens; a torch reference of what dispatch kernels do.

        It does not synchronize with the host.

        Args:
            topk_ids: Chosen experts, int32 or int64 ``[M, k]``.
            offset: Offset of the token index.

        Returns:
            Ranks and local ids, both int32 ``[M, k]``; -1 for ids that are not experts.

        Raises:
            TensorError: The ids have the wrong shape, dtype or device.
        """
        check_shape("topk_ids", topk_ids, ("M", "k"))
        check_dtype("topk_ids", topk_ids, (torch.int32, torch.int64))
        if topk_ids.device != self.slots.device:
            raise TensorError(f"topk_ids is on {topk_ids.device}, the tables are on {self.slots.device}")
        offset = whole_number("offset", offset, 0)
        experts = self.slots.shape[0]
        ids = topk_ids.long()
        valid = (ids >= 0) & (ids < experts)
        ids = torch.where(valid, ids, 0)
        token = torch.arange(offset, offset + ids.shape[0], device=ids.device)[:, None]
        slot = self.slots[ids, token % self.counts[ids]]
        ranks = torch.where(valid, slot // self.stride, -1)
        return ranks.int(), torch.where(valid, slot % self.stride, -1).int()

    def local_ids(self, topk_ids: Tensor, rank: int, *, offset: int = 0) -> Tensor:
        """Map chosen experts to local indices on one rank.

        For ranks that see all tokens: each (token, expert) pair is on exactly one rank, so the outputs of the ranks add
        up.

        Args:
            topk_ids: Chosen experts, int32 or int64 ``[M, k]``.
            rank: The rank.
            offset: Offset of the token index.

        Returns:
            int32 ``[M, k]``; -1 for pairs that other ranks process.
        """
        rank = whole_number("rank", rank, 0)
        ranks, local = self.choose(topk_ids, offset=offset)
        return torch.where(ranks == rank, local, -1)
