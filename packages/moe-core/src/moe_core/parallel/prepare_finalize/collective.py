"""Base of the prepare/finalize classes that dispatch tokens to the ranks of their experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core.errors import ConfigError, TensorError
from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
    rows_of_chosen,
)
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.distributed.host_numbers import HostNumbers
from moe_core.parallel.distributed.same_call import compare_calls, compare_same_tokens, hosts_are_silent
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


F = TypeVar("F")

#: Largest number of sizes of calls that a layer keeps.
_MOST_FORMS = 256


@dataclass(frozen=True, eq=False)
class Arrived(Prepared):
    """Tokens of several ranks after dispatch.

    Attributes:
        handle: What dispatch returned for combine.
    """

    handle: object = None


class CollectivePrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Base of classes that move tokens across ranks, each token as one row of bytes.

    A subclass dispatches rows (:meth:`dispatch`) and combines sums (:meth:`combine`). Tokens are quantized before
    dispatch if ``quantize_as`` has per-token scales; a scale that tokens share is computed on arrival. If
    tensor-parallel ranks have the same tokens, each exchanges with the ranks of the same ``tp_rank``, and the results
    are summed over ``tp`` at the end.

    On meta tensors, which are used to record launches, tokens arrive as they were sent.

    Args:
        config: Config of the layer.
        groups: Process groups of the layer; ``dp_size`` must be more than 1.
        placement: Placement of experts. Default: consecutive experts.

    Raises:
        ConfigError: There are no groups, or ``dp_size`` is 1.
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
        #: The ranks that exchange tokens; this rank's position is ``dp_rank``.
        self.exchange: Communicator = groups.among(exchanged)
        self.ranks: ParallelGroups = groups
        self._checks = checks_values()
        self._code: TokenCode | None = None
        #: Encoding and buffer sizes of a call, keyed by the largest number of tokens per rank.
        self._forms: dict[int, Any] = {}
        self._sums = groups.parallel.token_sharing is TokenSharing.EP_RANK
        self._only_launches: tuple[QuantKey | None, bool] | None = None
        self.destinations = Destinations.of_layer(config, groups.parallel, placement, offset=groups.parallel.dp_rank)
        self.placement = self.destinations.placement

    @property
    def maps_experts(self) -> bool:  # type: ignore[override]
        return True

    @property
    def copies(self) -> int:
        """Number of exchanging ranks that get each token sent to an expert-parallel rank."""
        parallel = self.ranks.parallel
        return parallel.tp_size if parallel.token_sharing is TokenSharing.NONE else 1

    def move_experts(self, placement: ExpertPlacement) -> None:
        self.destinations.move(placement)
        self.placement = placement

    def travels_quantized(self, key: QuantKey) -> bool:
        """Whether tokens are quantized before dispatch; otherwise they are quantized on arrival.

        Args:
            key: Quantization of activations.

        Returns:
            True if the key has per-token scales.
        """
        return key.is_token_wise

    def code(self, hidden: Tensor, quantize_as: QuantKey | None) -> TokenCode:
        """Return the encoding of hidden states; the same object for calls of the same kind.

        Args:
            hidden: Hidden states ``[M, K]``.
            quantize_as: Quantization before dispatch; None for unquantized.

        Returns:
            The encoding.
        """
        found, columns = self._code, hidden.shape[1]
        if found is None or found.key is not quantize_as or found.columns != columns or found.dtype is not hidden.dtype:
            self._code = found = TokenCode(columns, hidden.dtype, quantize_as)
        return found

    def form(
        self, most: int, hidden_states: Tensor, quantize_as: QuantKey | None, make: Callable[[int, TokenCode], F]
    ) -> F:
        """Return the sizes of calls; cached because each call needs them.

        Args:
            most: Largest number of tokens that a rank brings.
            hidden_states: Tokens of this rank.
            quantize_as: Quantization before dispatch; None for unquantized.
            make: Returns the sizes for ``most`` and an encoding.

        Returns:
            The sizes.
        """
        code, known = self.code(hidden_states, quantize_as), self._forms.get(most)
        if known is None or known[0] is not code:
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            known = self._forms[most] = code, make(most, code)
        found: F = known[1]
        return found

    def only_launches(self, quantize_as: QuantKey | None) -> bool:
        """Whether dispatch and combine make nothing but launches, apart from communication.

        Args:
            quantize_as: Quantization of the tokens; None for unquantized.

        Returns:
            False if the hosts check the call, tokens carry adapter numbers or are quantized on arrival.
        """
        found = self._only_launches
        if found is None or found[0] is not quantize_as:
            on_arrival = quantize_as is not None and not self.travels_quantized(quantize_as)
            only = not (self._checks or self.config.is_lora_enabled or on_arrival)
            found = self._only_launches = quantize_as, only
        return found[1]

    def max_tokens(self, num_tokens: int) -> int:
        return num_tokens * self.ranks.parallel.dp_size

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        return self.prepare_async(hidden_states, routing, quantize_as, static_scale).wait()

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        self.finalize_async(output, expert_output, prepared, routing, reduce).wait()

    def prepare_async(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> AsyncResult[Prepared]:
        """Begin to dispatch tokens; see the base class.

        The ``expert_map`` is ignored, because the placement defines where experts are. If ``tokens_per_rank`` is not
        given and is needed, ranks exchange it, and the host waits.
        """
        from moe_core.kernels.ops.quantize import quantize_activation

        counts = routing.tokens_per_rank
        if self._checks and not hosts_are_silent(hidden_states.device):
            counts = self.counts(hidden_states, counts)
        own = quantize_as is not None and self.travels_quantized(quantize_as)
        adapter_ids = routing.adapter_ids
        if adapter_ids is None and self.config.is_lora_enabled:
            # Tokens of other ranks may have adapters, and all rows have the same layout.
            adapter_ids = torch.full((len(hidden_states),), -1, dtype=torch.int32, device=hidden_states.device)
        leaving = Tokens(hidden_states, None, routing.topk_weights, routing.topk_ids, adapter_ids)
        # A scale that tokens share would also cover rows that contain no token.
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

        return AsyncResult(arrived)

    def finalize_async(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> AsyncResult[None]:
        if not isinstance(prepared, Arrived):
            raise TypeError(f"finalize got {type(prepared).__name__}, expected what this object's prepare returned")
        partial = expert_output
        if expert_output.dim() == 3:  # unweighted, one row per pair
            partial = torch.empty(expert_output.shape[::2], dtype=output.dtype, device=output.device)
            reduce.apply(partial, expert_output, prepared.routing, self.config)
        return self.combine(output, partial, prepared.handle)

    def sum_ranks(self, output: Tensor, partial: Tensor) -> None:
        if self._sums and not output.is_meta:
            ranks = self.ranks.among(self.ranks.tp)
            compare_same_tokens(ranks, self.layer_number, output)
            sum_ranks(ranks, output, fixed_order=self.config.batch_invariant).wait()

    def every_token(self, rows: int) -> int:
        """Estimate from how many tokens the rows that arrive were chosen, for uniform routing.

        Args:
            rows: Number of rows that arrive.

        Returns:
            Number of tokens.
        """
        from moe_core.parallel.distributed.uniform_routing import expected_ranks

        config, ep_size = self.config, self.ranks.parallel.ep_size
        return round(rows * ep_size / float(expected_ranks(config.num_experts, ep_size, config.top_k)))

    def counts(self, hidden_states: Tensor, given: Sequence[int] | None) -> Sequence[int]:
        """Return the number of tokens of each rank that exchanges some.

        Ranks exchange their counts, and ``given`` is compared with them. It is used unchecked with NCCL on several
        hosts, where ranks would wait for their GPUs. Under CUDA graph capture all ranks bring as many as this one,
        unless ``given`` is set.

        Args:
            hidden_states: Tokens of this rank.
            given: The caller's ``tokens_per_rank``, if any.

        Returns:
            Number of tokens per rank.

        Raises:
            TensorError: ``given`` is wrong.
            CommunicationError: A rank did not call.
        """
        own, ranks, what = len(hidden_states), self.exchange, "ranks tell how many tokens they bring (host)"
        if hosts_are_silent(hidden_states.device):
            self.check_own(own, given)
            return [own] * self.ranks.parallel.dp_size if given is None else given
        if given is not None and not self._checks and ranks.on_gpus and HostNumbers.connect(ranks, what) is None:
            self.check_own(own, given)
            return given
        return self.tell(own, given, what)[0]

    def tell(
        self, own: int, given: Sequence[int] | None, what: str, numbers: Sequence[int] = ()
    ) -> tuple[list[int], list[list[int]]]:
        """Exchange token counts and further numbers; see :func:`compare_calls`.

        Args:
            own: Number of tokens of this rank.
            given: The caller's ``tokens_per_rank``, if any.
            what: Clause of error messages, such as "experts are moved".
            numbers: Further numbers of this rank.

        Returns:
            Token counts, and the numbers of each rank.
        """
        return compare_calls(self.exchange, self.layer_number, own, given, what, numbers)

    def check_own(self, own: int, given: Sequence[int] | None) -> None:
        """Check the caller's count for this rank.

        Args:
            own: Number of tokens of this rank.
            given: The caller's ``tokens_per_rank``, if any.

        Raises:
            TensorError: ``given`` has another length, or another count for this rank.
        """
        size, rank = self.ranks.parallel.dp_size, self.ranks.parallel.dp_rank
        if given is not None and (len(given) != size or given[rank] != own):
            raise TensorError(
                f"tokens_per_rank is {list(given)}, expected {size} numbers, and {own} for this rank, {rank}"
            )

    @abstractmethod
    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> AsyncResult[tuple[Tokens, object]]:
        """Begin to send this rank's tokens to the ranks of their experts.

        Args:
            tokens: Tokens with global expert ids.
            tokens_per_rank: Number of tokens of each rank, if known.
            quantize_as: Quantization before dispatch; None for unquantized.
            gaps: Whether the tokens that arrive may include unused rows, of arbitrary content and with experts -1.

        Returns:
            The pending tokens that arrive, and the handle for :meth:`combine`. Their expert numbers are local indices,
            -1 where another rank computes the expert.
        """

    @abstractmethod
    def combine(self, output: Tensor, partial: Tensor, handle: object) -> AsyncResult[None]:
        """Begin to send results back to the ranks of the tokens, and to sum them there.

        Args:
            output: ``[M, K]`` for this rank's tokens, written when the result is waited for.
            partial: ``[M', K]``: the weighted sum of each token that arrived.
            handle: Handle returned by :meth:`dispatch`.

        Returns:
            The pending result.
        """


def local_experts(slots: Tensor, stride: int, ep_rank: int) -> Tensor:
    """Map slots to local indices on one rank.

    Args:
        slots: Slots (rank * stride + local index) ``[M, k]``.
        stride: Stride of the slots.
        ep_rank: The rank.

    Returns:
        int32 ``[M, k]``; -1 for slots of other ranks.
    """
    here = slots.div(stride, rounding_mode="floor") == ep_rank
    return torch.where(here, slots - ep_rank * stride, -1).int()
