"""Map a token's experts to ranks: a placement, and its tables on each device in use."""

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
    """Map from experts to the ranks that hold them, as one rank uses it: a placement and its tables on each device.

    Args:
        placement: The placement.
        ep_rank: This expert-parallel rank.
        offset: Token offset of this rank, if ranks dispatch separate tokens (see
            :class:`moe_core.parallel.placement.tables.ReplicaTables`).
    """

    def __init__(self, placement: ExpertPlacement, ep_rank: int, offset: int = 0) -> None:
        self.placement = placement
        self.ep_rank = ep_rank
        self.offset = offset
        self._tables: dict[torch.device, ReplicaTables] = {}
        self._steps: dict[torch.device, Replay] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy has separate tables; recorded launches refer to the tables of the original.
        return self.__dict__ | {"_steps": {}}

    @staticmethod
    def of_layer(
        config: FusedMoEConfig,
        parallel: FusedMoEParallelConfig,
        placement: ExpertPlacement | None,
        *,
        offset: int = 0,
    ) -> Destinations:
        """Build the destinations of a layer's rank.

        Args:
            config: Config of the layer.
            parallel: The rank.
            placement: Placement of experts. Default: consecutive experts.
            offset: Token offset of this rank.

        Returns:
            The destinations.

        Raises:
            ConfigError: The placement has other experts or ranks, this rank holds another number of experts than
                ``config`` states, or the layer is batch invariant and the placement has replicas.
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
        """Return the tables on a device.

        The first call creates them and must not be captured in a CUDA graph.

        Args:
            device: The device.

        Returns:
            The tables.
        """
        from moe_core.parallel.placement.tables import ReplicaTables

        if device not in self._tables:
            self._tables[device] = ReplicaTables.of(self.placement, device)
        return self._tables[device]

    def step(
        self, device: torch.device, call: Callable[[], object], tensors: tuple[Tensor | None, ...], *kind: Hashable
    ) -> None:
        """Run a step that only launches kernels; repeated steps are replayed.

        See :meth:`moe_core.kernels.launch.replay.Replay.step`.

        Args:
            device: Device of the tables.
            call: The step.
            tensors: Tensors of the step, in addition to the tables.
            kind: Key of the step.
        """
        first = tensors[0]
        if first is None or not first.is_cuda:
            call()
            return
        if device not in self._steps:
            self._steps[device] = Replay(self.tables(device))
        self._steps[device].step(call, tensors, *kind)

    def move(self, placement: ExpertPlacement) -> None:
        """Switch to another placement, in the same memory, which captured graphs keep reading.

        Args:
            placement: The new placement.

        Raises:
            ConfigError: The number of experts on this rank differs, or the placement does not fit the tables.
        """
        if len(placement.ranks[self.ep_rank]) != len(self.placement.ranks[self.ep_rank]):
            raise ConfigError(
                f"the new placement has {len(placement.ranks[self.ep_rank])} experts on ep_rank {self.ep_rank}, "
                f"the old one {len(self.placement.ranks[self.ep_rank])}: the number of experts per rank cannot "
                "change"
            )
        for tables in self._tables.values():
            tables.copy_(placement)
        self.placement = placement

    def choose(self, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the replicas that process this rank's tokens.

        Args:
            topk_ids: Chosen experts ``[M, k]``.

        Returns:
            Ranks and local ids, both int32 ``[M, k]``; -1 for ids that are not experts.
        """
        return self.tables(topk_ids.device).choose(topk_ids, offset=self.offset)

    def local_ids(self, topk_ids: Tensor) -> Tensor:
        """Map the experts of tokens that all ranks have to local indices.

        Args:
            topk_ids: Chosen experts ``[M, k]``.

        Returns:
            int32 ``[M, k]``; -1 for experts that another rank computes.
        """
        from moe_core.kernels.ops._backend import use_triton
        from moe_core.kernels.ops.dispatch import held_experts

        tables = self.tables(topk_ids.device)
        if use_triton(topk_ids, "auto"):
            return held_experts(topk_ids, tables, self.held(tables))
        return tables.local_ids(topk_ids, self.ep_rank)

    def held(self, tables: ReplicaTables) -> tuple[int, int]:
        """Return the range of numbers that tables assign to this rank's experts.

        Args:
            tables: The tables.

        Returns:
            (first number, count).
        """
        return self.ep_rank * tables.stride, tables.stride


def _refuse_replicas(placement: ExpertPlacement) -> None:
    """Raise ConfigError if an expert is on several ranks.

    Replicas take tokens by their position in the batch, so the partial sums of a token would depend on it.
    """
    found = [expert for expert, places in enumerate(placement.replicas) if len(places) > 1]
    if found:
        named = ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        raise ConfigError(
            f"the layer is batch invariant, and the placement has experts {named} on several ranks, and a "
            "token's index in the batch selects the replica: use a placement without replicas, or "
            "batch_invariant=False"
        )
