"""Prepare/finalize for ranks with the same tokens: no dispatch, a sum over ranks.

The outputs of the ranks are partial sums: over other experts, or over other columns of the same experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core.errors import ConfigError
from moe_core.interface.prepare_finalize import Prepared, TokenRouting
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.parallel.distributed.same_call import compare_same_tokens
from moe_core.parallel.prepare_finalize.destinations import Destinations
from moe_core.parallel.prepare_finalize.fixed_order import sum_and_scatter, sum_ranks
from moe_core.parallel.prepare_finalize.no_parallel import PrepareAndFinalizeNoParallel
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement


class AllReducePrepareAndFinalize(PrepareAndFinalizeNoParallel):
    """All ranks have the same tokens and get the same output, by an all-reduce.

    With a placement each token goes to one replica of its experts, and the caller's expert map is ignored. Without one
    the caller's map defines the local experts. The experts' launches are replayed as on one rank.

    Args:
        config: Config of the layer.
        groups: Process groups of the layer; must have ``dp_size`` 1.
        placement: Placement of experts.

    Raises:
        ConfigError: There are no groups, or ranks bring separate tokens.
    """

    name = "all_reduce"
    monolithic = True
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.ALL}), batch_invariant=True, verified_on=("cpu", "2 × NVIDIA H200 (sm90)")
    )

    def __init__(
        self,
        config: FusedMoEConfig,
        groups: ParallelGroups | None = None,
        *,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__(config, groups, placement=placement)
        if groups is None or groups.parallel.token_sharing is not TokenSharing.ALL:
            raise ConfigError(
                f"{type(self).__name__} adds partial sums of ranks with the same tokens: it needs process groups "
                f"(ParallelGroups) with dp_size 1, got {groups}"
            )
        self.ranks: ParallelGroups = groups
        self.destinations = None if placement is None else Destinations.of_layer(config, groups.parallel, placement)

    @property
    def maps_experts(self) -> bool:  # type: ignore[override]
        return self.destinations is not None

    @property
    def recordable(self) -> bool:  # type: ignore[override]
        return self.destinations is None

    def move_experts(self, placement: ExpertPlacement) -> None:
        if self.destinations is None:
            raise ConfigError("the layer has no placement to change: the caller's expert map defines its experts")
        self.destinations.move(placement)
        self.placement = placement

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        if self.destinations is not None:
            routing = replace(routing, topk_ids=self.destinations.local_ids(routing.topk_ids), expert_map=None)
        return super().prepare(hidden_states, routing, quantize_as, static_scale)

    def sum_ranks(self, output: Tensor, partial: Tensor) -> None:
        ranks = self.ranks.among()
        compare_same_tokens(ranks, self.layer_number, partial)
        sum_ranks(ranks, output, fixed_order=self.config.batch_invariant).wait()


class ReduceScatterPrepareAndFinalize(AllReducePrepareAndFinalize):
    """All ranks have the same tokens, and each gets a slice of the output, by a reduce-scatter.

    Rank r gets up to ``ceil(M / ranks)`` of the M tokens, starting at ``r * ceil(M / ranks)``; the last slices may be
    shorter or empty. This suits subsequent layers that are split by tokens (sequence parallelism), at half the bytes of
    an all-reduce.
    """

    name = "reduce_scatter"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.ALL}), batch_invariant=True, verified_on=("cpu", "2 × NVIDIA H200 (sm90)")
    )
    sums_in_place = False

    def output_tokens(self, num_tokens: int) -> int:
        each = -(-num_tokens // self.ranks.parallel.world_size)
        return max(min(each, num_tokens - self.ranks.parallel.rank * each), 0)

    def sum_ranks(self, output: Tensor, partial: Tensor) -> None:
        groups, tokens = self.ranks, partial.shape[0]
        size = groups.parallel.world_size
        each = -(-tokens // size)
        compare_same_tokens(groups.among(), self.layer_number, partial)
        if not partial.numel():
            return
        if each * size > tokens:
            partial = torch.cat([partial, partial.new_zeros(each * size - tokens, partial.shape[1])])
        fixed = self.config.batch_invariant
        sum_and_scatter(groups.among(), output, partial, each, fixed_order=fixed).wait()
