"""Which rank computes which of a token's experts: a placement, and its tables on the devices that ask."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.kernels.launch.replay import Replay
from moe_core.spec.config import FusedMoEConfig, FusedMoEParallelConfig

if TYPE_CHECKING:
    from moe_core.parallel.placement.placement import ExpertPlacement
    from moe_core.parallel.placement.tables import ReplicaTables


class Destinations:
    """A placement as a rank asks it.

    ``offset``: this rank's, where ranks dispatch tokens of their own (see
    :class:`moe_core.parallel.placement.tables.ReplicaTables`).
    """

    def __init__(self, placement: ExpertPlacement, ep_rank: int, offset: int = 0) -> None:
        self.placement = placement
        self.ep_rank = ep_rank
        self.offset = offset
        self._tables: dict[torch.device, ReplicaTables] = {}
        self._steps: dict[torch.device, Replay] = {}

    def __getstate__(self) -> dict[str, Any]:
        # a copy has tables in memory of its own, and the records name those of this one
        return self.__dict__ | {"_steps": {}}

    @staticmethod
    def of_layer(
        config: FusedMoEConfig,
        parallel: FusedMoEParallelConfig,
        placement: ExpertPlacement | None,
        *,
        offset: int = 0,
    ) -> Destinations:
        """Of a layer's rank; no placement: consecutive experts.

        Raises ConfigError for a placement of other experts or ranks, where this rank holds another number of experts
        than ``config`` says, and for replicas where the layer is batch invariant.
        """
        from moe_core.parallel.placement.placement import ExpertPlacement

        found = ExpertPlacement.contiguous(config.num_experts, parallel.ep_size) if placement is None else placement
        if (found.num_experts, found.ep_size) != (config.num_experts, parallel.ep_size):
            raise ConfigError(
                f"the placement is of {found.num_experts} experts on {found.ep_size} ranks, the layer has "
                f"{config.num_experts} on {parallel.ep_size}"
            )
        held = len(found.ranks[parallel.ep_rank])
        if held != config.local_experts:
            named = "" if placement is not None else " (consecutive experts, since none was given)"
            raise ConfigError(
                f"the placement{named} has {held} experts on ep_rank {parallel.ep_rank}, the layer's config has "
                f"num_local_experts {config.local_experts}"
            )
        if config.batch_invariant:
            _refuse_replicas(found)
        return Destinations(found, parallel.ep_rank, offset)

    def tables(self, device: torch.device) -> ReplicaTables:
        """On ``device``; made by the first call, which is not captured in a CUDA graph."""
        from moe_core.parallel.placement.tables import ReplicaTables

        if device not in self._tables:
            self._tables[device] = ReplicaTables.of(self.placement, device)
        return self._tables[device]

    def step(
        self, device: torch.device, call: Callable[[], object], tensors: tuple[Tensor | None, ...], *kind: Hashable
    ) -> None:
        """``call()``: a step of a call that only launches kernels, with ``tensors`` and the tables on ``device``.

        Steps that repeat are replayed (:meth:`moe_core.kernels.launch.replay.Replay.step`, whose ``kind`` this is).
        """
        first = tensors[0]
        if first is None or not first.is_cuda:
            call()
            return
        if device not in self._steps:
            self._steps[device] = Replay(self.tables(device))
        self._steps[device].step(call, tensors, *kind)

    def move(self, placement: ExpertPlacement) -> None:
        """Take another placement from the next call on, in the same memory, which captured graphs go on reading.

        Raises ConfigError for one that does not fit.
        """
        if len(placement.ranks[self.ep_rank]) != len(self.placement.ranks[self.ep_rank]):
            raise ConfigError(
                f"the new placement has {len(placement.ranks[self.ep_rank])} experts on ep_rank {self.ep_rank}, the "
                f"old one {len(self.placement.ranks[self.ep_rank])}: a rank's number of experts stays"
            )
        for tables in self._tables.values():
            tables.copy_(placement)
        self.placement = placement

    def choose(self, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(ranks, local ids) [M, k] int32 of the replicas that take this rank's tokens; -1 for no expert."""
        return self.tables(topk_ids.device).choose(topk_ids, offset=self.offset)

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """[M, k] int32: local indices of the experts that this rank computes of tokens that all have; else -1."""
        from moe_core.kernels.ops._backend import use_triton
        from moe_core.kernels.ops.dispatch import held_experts

        tables = self.tables(topk_ids.device)
        if use_triton(topk_ids, "auto"):
            return held_experts(topk_ids, tables, self.held(tables))
        return tables.local_ids(topk_ids, self.ep_rank)

    def held(self, tables: ReplicaTables) -> tuple[int, int]:
        """(first, how many) of the numbers that ``tables`` give this rank's experts."""
        return self.ep_rank * tables.stride, tables.stride


def _refuse_replicas(placement: ExpertPlacement) -> None:
    """ConfigError where an expert is on several ranks: they take tokens by their place in the batch, and then a token's
    experts are added up in other parts.
    """
    found = [expert for expert, places in enumerate(placement.replicas) if len(places) > 1]
    if found:
        named = ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise ConfigError(
            f"the layer is batch invariant, and the placement has experts {named} on several ranks, of which a token's "
            "place in the batch chooses one: give a placement without replicas, or batch_invariant=False"
        )
