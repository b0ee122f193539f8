"""Placements on the device: which rank's which expert takes a token."""

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

    - ``slots`` [E, R] int32, contiguous: of each expert's replicas ``rank * stride + local index``.  An expert with
      fewer than R replicas repeats them from its first, so every entry is valid.
    - ``counts`` [E] int32: replicas of each expert, 1..R
    - ``stride``: most experts that a rank can hold

    A slot of token ``t`` whose expert is ``e`` goes to ``slots[e, t % counts[e]]``, where ``t`` is the row of
    ``topk_ids``, plus an offset that a rank may choose: so replicas share an expert's tokens evenly, the same ones at
    every call.  Ranks that must agree about it (each sees all tokens) use the same rows and the offset 0; ranks that
    dispatch tokens of their own use their own rank, so that single tokens of many ranks don't meet at one replica.

    R and ``stride`` are capacities: :meth:`copy_` brings another placement into the same memory, which captured CUDA
    graphs go on reading.
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
        """Tables of ``placement`` with room for ``max_replicas`` (default: as many as there are ranks) and ``stride``.

        Raises ConfigError where the placement needs more.
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
        return self.slots.device

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "slots", self.slots
        yield "counts", self.counts

    def copy_(self, placement: ExpertPlacement) -> None:
        """Overwrite the tables in place with those of ``placement``.

        Raises ConfigError, with the old ones untouched, for other numbers of experts, or more than there is room for.
        """
        slots, counts = self._rows(placement)
        self.slots.copy_(slots)
        self.counts.copy_(counts)

    def _rows(self, placement: ExpertPlacement) -> tuple[Tensor, Tensor]:
        """(slots, counts) of a placement that fits, on the CPU."""
        check_instance("placement", placement, ExpertPlacement)
        experts, room = self.slots.shape
        if placement.num_experts != experts:
            raise ConfigError(f"the placement is of {placement.num_experts} experts, the tables are of {experts}")
        for what, needed, there in (
            ("replicas of an expert", placement.max_replicas, room),
            ("experts on a rank", placement.max_local_experts, self.stride),
        ):
            if needed > there:
                raise ConfigError(f"the placement has up to {needed} {what}, the tables have room for {there}")
        flat = [[rank * self.stride + local for rank, local in places] for places in placement.replicas]
        rows = [[row[replica % len(row)] for replica in range(room)] for row in flat]
        counts = torch.tensor([len(row) for row in flat], dtype=torch.int32, device="cpu")
        return torch.tensor(rows, dtype=torch.int32, device="cpu"), counts

    def choose(self, topk_ids: Tensor, *, offset: int = 0) -> tuple[Tensor, Tensor]:
        """(ranks, local ids), both [M, k] int32, of the replicas that take ``topk_ids`` [M, k]; -1 for no expert.

        What kernels that dispatch do, in torch operations; without host synchronisation.
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
        """[M, k] int32: the local index of each expert whose token ``rank`` takes, -1 for those that others take.

        For ranks that see all tokens: each (token, slot) is on exactly one rank, so the ranks' outputs add up.
        """
        rank = whole_number("rank", rank, 0)
        ranks, local = self.choose(topk_ids, offset=offset)
        return torch.where(ranks == rank, local, -1)
