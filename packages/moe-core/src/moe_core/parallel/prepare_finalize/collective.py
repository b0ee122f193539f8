"""What all prepare/finalize classes share that bring tokens to the ranks of their experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_core._support.async_result import Pending
from moe_core.errors import ConfigError, TensorError
from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
    rows_of_chosen,
)
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.distributed.host_numbers import share_memory
from moe_core.parallel.distributed.same_call import CallFacts, compare_calls, compare_same_tokens, hosts_are_silent
from moe_core.parallel.prepare_finalize.destinations import Destinations
from moe_core.parallel.prepare_finalize.fixed_order import sum_ranks
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig, TokenSharing
from moe_core.spec.environment import checks_values
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from moe_core.parallel.distributed.communication import Communicator
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement


@dataclass(frozen=True, eq=False)
class Arrived(Prepared):
    """Tokens of several ranks.  ``handle``: what dispatch returned for combine."""

    handle: object = None


class CollectivePrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Base of classes by which tokens cross ranks, each token as one row of bytes.

    A subclass moves rows there (:meth:`dispatch`) and sums back (:meth:`combine`).  Tokens are quantised before they
    travel where ``quantize_as`` gives a token scales of its own; a scale that tokens share is found when they have
    arrived.  Where tensor-parallel ranks have the same tokens, each exchanges with the ranks of its own ``tp_rank``,
    and the results are added up over ``tp`` at the end.

    On meta tensors, by which launches are recorded, tokens arrive as they left.
    """

    activation_format = FusedMoEActivationFormat.STANDARD
    collective = True
    lora = True

    def __init__(
        self,
        config: FusedMoEConfig,
        groups: ParallelGroups | None = None,
        *,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__(config, groups, placement=placement)
        exchanged = None if groups is None else groups.tokens
        if groups is None or exchanged is None:
            raise ConfigError(
                f"{type(self).__name__} moves tokens between ranks: it needs process groups (ParallelGroups) whose "
                f"dp_size is more than 1, got {groups}"
            )
        #: the ranks that exchange tokens, this one in it by ``dp_rank``
        self.exchange: Communicator = groups.among(exchanged)
        self.ranks: ParallelGroups = groups
        self._checks = checks_values()
        self._code: TokenCode | None = None
        self.destinations = Destinations.of_layer(config, groups.parallel, placement, offset=groups.parallel.dp_rank)
        self.placement = self.destinations.placement

    @property
    def maps_experts(self) -> bool:
        return True

    @property
    def copies(self) -> int:
        """How many of the ranks that exchange tokens get each token that is sent to an expert-parallel rank."""
        parallel = self.ranks.parallel
        return parallel.tp_size if parallel.token_sharing is TokenSharing.NONE else 1

    def move_experts(self, placement: ExpertPlacement) -> None:
        self.destinations.move(placement)
        self.placement = placement

    def travels_quantized(self, key: QuantKey) -> bool:
        """Whether tokens that are quantised by ``key`` can travel so; others are quantised where they arrive."""
        return key.is_token_wise

    def code(self, hidden: Tensor, quantize_as: QuantKey | None) -> TokenCode:
        """How ``hidden`` [M, K] travels; the same object for calls of the same kind."""
        found, columns = self._code, hidden.shape[1]
        if found is None or found.key is not quantize_as or found.columns != columns or found.dtype is not hidden.dtype:
            self._code = found = TokenCode(columns, hidden.dtype, quantize_as)
        return found

    def max_tokens(self, num_tokens: int) -> int:
        return num_tokens * self.ranks.parallel.dp_size

    def prepare_async(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Pending[Prepared]:
        """As of the base.  The ``expert_map`` is not asked: the placement says where experts are.

        Where ``tokens_per_rank`` is not given, ranks tell each other where it is needed, which the host waits for.
        """
        from moe_core.kernels.ops.quantize import quantize_activation

        counts = routing.tokens_per_rank
        if self._checks and not hosts_are_silent(hidden_states.device):
            counts = self.counts(hidden_states, counts)
        own = quantize_as is not None and self.travels_quantized(quantize_as)
        adapter_ids = routing.adapter_ids
        if adapter_ids is None and self.config.is_lora_enabled:
            # other ranks' tokens may have adapters, and all travel alike
            adapter_ids = torch.full((len(hidden_states),), -1, dtype=torch.int32, device=hidden_states.device)
        leaving = Tokens(hidden_states, None, routing.topk_weights, routing.topk_ids, adapter_ids)
        # a scale that tokens share would span rows that no token is in
        gaps = own or quantize_as is None or quantize_as.is_static
        arriving = self.dispatch(leaving, counts, quantize_as if own else None, gaps=gaps)

        def arrived() -> Prepared:
            tokens, handle = arriving.wait()
            hidden, found = tokens.hidden_states, tokens.scale
            if quantize_as is not None and not own:
                hidden, found = quantize_activation(hidden, quantize_as, static_scale=static_scale)
            came = TokenRouting(tokens.weights, tokens.experts, adapter_ids=tokens.adapter_ids)
            rows = len(hidden)
            expert_tokens = rows_of_chosen(rows, self.chosen_from(rows, handle), self.config)
            return Arrived(hidden, came, found, expert_tokens, handle=handle)

        return Pending(arrived)

    def finalize_async(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> Pending[None]:
        if not isinstance(prepared, Arrived):
            raise TypeError(f"finalize got {type(prepared).__name__}, expected what this object's prepare returned")
        partial = expert_output
        if expert_output.dim() == 3:  # unweighted, a row for each slot
            partial = torch.empty(expert_output.shape[::2], dtype=output.dtype, device=output.device)
            reduce.apply(partial, expert_output, prepared.routing, self.config)
        return self.combine(output, partial, prepared.handle)

    def sum_ranks_async(self, output: Tensor, partial: Tensor) -> Pending[None]:
        if self.ranks.parallel.token_sharing is not TokenSharing.EP_RANK or output.is_meta:
            return Pending.done(None)
        ranks = self.ranks.among(self.ranks.tp)
        compare_same_tokens(ranks, self.layer_number, output)
        return sum_ranks(ranks, output, fixed_order=self.config.batch_invariant)

    def every_token(self, rows: int) -> int:
        """Of how many tokens ``rows`` have an expert here, by uniform routing."""
        from moe_core.parallel.distributed.cost import expected_ranks

        config, ep_size = self.config, self.ranks.parallel.ep_size
        return round(rows * ep_size / float(expected_ranks(config.num_experts, ep_size, config.top_k)))

    def counts(self, hidden_states: Tensor, given: Sequence[int] | None) -> Sequence[int]:
        """How many tokens each rank that exchanges some brings, as the ranks tell; this one has ``hidden_states``.

        What is ``given`` is compared with it, except where NCCL's ranks on several hosts would wait for their GPUs.
        Under CUDA-graph capture all ranks bring as many as this one, or what is given.
        """
        own, ranks = len(hidden_states), self.exchange
        if hosts_are_silent(hidden_states.device):
            self.check_own(own, given)
            return [own] * self.ranks.parallel.dp_size if given is None else given
        if given is not None and not (self._checks or ranks.device.type == "cpu" or share_memory(ranks)):
            self.check_own(own, given)
            return given
        return self.tell(own, given, "ranks tell how many tokens they bring (host)")[0]

    def tell(
        self, own: int, given: Sequence[int] | None, what: str, numbers: Sequence[int] = ()
    ) -> tuple[list[int], list[list[int]]]:
        """Token counts and ``numbers`` of the ranks: :func:`compare_calls`."""
        return compare_calls(self.exchange, CallFacts(self.layer_number, own, given), what, numbers)

    def check_own(self, own: int, given: Sequence[int] | None) -> None:
        """TensorError where the ``given`` numbers of tokens say another one of this rank."""
        size, rank = self.ranks.parallel.dp_size, self.ranks.parallel.dp_rank
        if given is not None and (len(given) != size or given[rank] != own):
            raise TensorError(
                f"tokens_per_rank is {list(given)}, expected {size} numbers, and {own} for this rank, {rank}"
            )

    @abstractmethod
    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> Pending[tuple[Tokens, object]]:
        """Begin to send this rank's tokens, with global expert ids, to the ranks of their experts.

        They are quantised as ``quantize_as``, where that is given, before they leave.  ``gaps``: among the tokens that
        come may be rows that nobody sent, of any content and of experts -1.  The result: the tokens that
        came, with the local index of each expert, -1 where another rank computes it; and the handle that
        :meth:`combine` is given.
        """

    @abstractmethod
    def combine(self, output: Tensor, partial: Tensor, handle: object) -> Pending[None]:
        """Begin to send ``partial`` [M', K], a weighted sum for each token that came, back to where the tokens are.

        ``output`` [M, K] of this rank's tokens is written when the result is waited for.
        """


def local_experts(slots: Tensor, stride: int, ep_rank: int) -> Tensor:
    """[M, k] int32: the local index of the slots (rank * stride + local index) that are on ``ep_rank``, else -1."""
    here = slots.div(stride, rounding_mode="floor") == ep_rank
    return torch.where(here, slots - ep_rank * stride, -1).int()
