"""The interface of prepare and finalize, and who weights and sums over top-k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moe_core._support.async_result import Pending
from moe_core.errors import ConfigError
from moe_core.interface.experts import ExpertTokensMetadata, FusedMoEExperts
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.spec.config import FusedMoEActivationFormat, FusedMoEConfig, TokenSharing
from moe_core.spec.device import DeviceInfo
from moe_core.spec.environment import Environment
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    import torch

    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.placement.placement import ExpertPlacement


@dataclass(frozen=True, eq=False)
class TokenRouting:
    """What a call says of its M tokens, beside their hidden states.

    - ``topk_weights`` [M, k] float32 and ``topk_ids`` [M, k] int32 or int64, both contiguous; an id that names no
      expert is none
    - ``expert_map`` [E] int32: the local index of each expert that an id names, -1 where another rank has it; None
      where ids are local indices
    - ``adapter_ids`` [M] int32, where the call has LoRA adapters
    - ``tokens_per_rank``: how many tokens each of the ``dp_size`` ranks brings, where the caller knows
    """

    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None = None
    adapter_ids: Tensor | None = None
    tokens_per_rank: Sequence[int] | None = None


class TopKWeightAndReduce(ABC):
    """Applies router weights to per-expert results and sums them per token."""

    @abstractmethod
    def apply(self, output: Tensor, expert_output: Tensor, routing: TokenRouting, config: FusedMoEConfig) -> None:
        """Write ``output`` [M, K] from ``expert_output`` (shape: see the subclass), whose rows ``routing`` is of.

        Weights that are applied on the input (``config``) are not applied again.
        A (token, slot) whose id selects no local expert contributes nothing, whatever its row holds.
        """


@dataclass(frozen=True, eq=False)
class Prepared:
    """What prepare hands to the experts.

    Standard format: ``hidden_states [M', K]``; batched: ``[E_local, T_max, K]`` with ``expert_tokens``, which say in
    the standard format how many rows experts have, where tokens and top-k do not.  ``scale`` where the hidden states
    were quantised.  ``routing`` is of the M' tokens: their ids go with its ``expert_map``, which is the caller's, or
    None where prepare made them local; its ``adapter_ids`` are of the rows of the hidden states ([M'] or
    [E_local, T_max]).
    """

    hidden_states: Tensor
    routing: TokenRouting
    scale: Tensor | None = None
    expert_tokens: ExpertTokensMetadata | None = None


def rows_of_chosen(rows: int, every: int, config: FusedMoEConfig) -> ExpertTokensMetadata | None:
    """What the experts have of ``rows`` tokens that were chosen from ``every``; None where none was left out."""
    return None if every == rows else ExpertTokensMetadata(mean=every * config.top_k / config.num_experts)


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Brings hidden states to the experts (prepare) and their results back (finalize).

    ``name``: what ``FusedMoEParallelConfig.all2all_backend`` calls it; ``claims``: what it can do.
    ``collective``: tokens cross ranks.  Then every rank takes part in every call, also without tokens of its own, and
    what prepare hands on are not the caller's tokens in the caller's order.  ``lora``: prepare hands adapter numbers
    on.  ``launches_only``: as of experts.  ``monolithic``: only :meth:`sum_ranks_async` is needed, which serves experts
    that route by themselves too.  ``stateless``: what ``launches_only`` promises follows from the layer's config alone.

    ``groups`` (:class:`moe_core.parallel.distributed.ParallelGroups`) are the process groups of the layer's ranks, and
    ``placement`` says which of them hold which experts (default: consecutive ones).  Classes that communicate need
    groups; the others leave both alone.

    :meth:`prepare_async` and :meth:`finalize_async` begin a step and return a :class:`Pending`, whose ``wait`` gives
    the result; a step that is done at once returns ``Pending.done(result)``.  Steps of several calls may be under way;
    all ranks begin and wait for them in the same order.
    """

    name: ClassVar[str] = ""
    claims: ClassVar[PrepareFinalizeClaims] = PrepareFinalizeClaims(frozenset(TokenSharing))
    activation_format: ClassVar[FusedMoEActivationFormat]
    collective: ClassVar[bool] = False
    lora: ClassVar[bool] = False
    launches_only: ClassVar[bool] = False
    stateless: ClassVar[bool] = False
    #: whether prepare hands on rows that no token is in, of experts -1 and of any content
    empty_rows: ClassVar[bool] = False
    #: the name of the class that a layer gets where :meth:`unavailable` says that the ranks can't have this one
    fallback: ClassVar[str] = ""
    monolithic: ClassVar[bool] = False
    #: whether :meth:`sum_ranks_async` adds up in place: its ``partial`` is its ``output``
    sums_in_place: ClassVar[bool] = True

    #: the layer's number among those of its groups, in the order in which they were made; calls between ranks carry it
    layer_number: int = 0

    def __init__(
        self,
        config: FusedMoEConfig,
        groups: ParallelGroups | None = None,
        *,
        placement: ExpertPlacement | None = None,
    ) -> None:
        self.config = config
        self.groups = groups
        self.placement = placement

    @classmethod
    def extra_reasons(
        cls, config: FusedMoEConfig, experts: type[FusedMoEExperts] | None, device: DeviceInfo
    ) -> list[str]:
        """Reasons against a layer, or against ``experts``, that the claims cannot express."""
        return []

    @classmethod
    def unsupported_reasons(
        cls,
        config: FusedMoEConfig,
        experts: type[FusedMoEExperts] | None,
        device: DeviceInfo,
        environment: Environment | None = None,
    ) -> list[str]:
        """Every reason why this class can't bring tokens to ``experts`` (None: to no class in particular); else empty.

        Pure: no process group is asked.
        """
        found = cls.claims.reasons_against(config, device, environment or Environment.current())
        if config.activation_format is not cls.activation_format:
            found.append(
                f"brings the {cls.activation_format.value} activation format, the experts take "
                f"{config.activation_format.value}"
            )
        if config.is_lora_enabled and not cls.lora:
            found.append("does not carry the numbers of LoRA adapters")
        if experts is not None:
            if experts.is_monolithic and not cls.monolithic:
                found.append(f"{experts.__name__} routes by itself, after tokens have been moved")
            named = experts.claims.all2all
            if cls.collective and named is not None and cls.name not in named:
                found.append(f"{experts.__name__} does not work behind {cls.name}")
        return [*found, *cls.extra_reasons(config, experts, device)]

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in CUDA graphs: the claim, unless this is known of the ranks."""
        return self.claims.cuda_graph

    def chosen_from(self, rows: int, handle: object = None) -> int:
        """Of how many tokens ``rows`` are those that came, in the mean over uniform routing.

        ``handle``: what dispatch gave for the call; None: any call.  More than ``rows`` where tokens come only to ranks
        that have one of their experts, and no rows stand for the others.
        """
        return rows

    def arrivals(self) -> Iterator[None]:
        """Once for each way in which tokens may arrive: meanwhile calls on meta tensors are recorded with that one.

        Several where it is not known before the first call.
        """
        yield

    @property
    def maps_experts(self) -> bool:
        """Whether it knows by itself which experts this rank has: the caller gives no expert map."""
        return False

    def move_experts(self, placement: ExpertPlacement) -> None:
        """Send tokens to where ``placement`` says, from the next call on; all ranks between the same two calls.

        The weights move by themselves.  Raises ConfigError where the placement doesn't fit, or there was none.
        """
        raise ConfigError(f"{type(self).__name__} sends no tokens to other ranks")

    @classmethod
    def unavailable(cls, groups: ParallelGroups, device: torch.device, own: list[str]) -> list[str]:
        """Every reason why the ranks of ``groups``, together, can't have it on their devices; empty if they can.

        ``own``: what :meth:`unsupported_reasons` says on this rank.  Where :attr:`fallback` is set all ranks call it,
        and get the same texts.
        """
        return own

    def max_tokens(self, num_tokens: int) -> int:
        """Most tokens that the experts can see when a rank brings ``num_tokens``: sizes the workspace."""
        return num_tokens

    def output_tokens(self, num_tokens: int) -> int:
        """Rows of the output that this rank gets when it brings ``num_tokens``."""
        return num_tokens

    @abstractmethod
    def prepare_async(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Pending[Prepared]:
        """Begin to bring ``hidden_states`` [M, K] to the experts, in their format.

        They are quantised by ``quantize_as`` unless that is None, with ``static_scale`` [1] where the key is static.
        The arguments stay as they are until the result is waited for.
        """

    @abstractmethod
    def finalize_async(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> Pending[None]:
        """Begin to bring back what the experts made of ``prepared``; ``routing`` is what prepare was given.

        ``output`` [M, K] is written when the result is waited for.
        """

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        """:meth:`prepare_async`, waited for."""
        return self.prepare_async(hidden_states, routing, quantize_as, static_scale).wait()

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        """:meth:`finalize_async`, waited for."""
        self.finalize_async(output, expert_output, prepared, routing, reduce).wait()

    def sum_ranks_async(self, output: Tensor, partial: Tensor) -> Pending[None]:
        """Begin to add up what ranks with the same tokens computed; the last step of a call, of monolithic experts too.

        ``partial`` [M, K] is this rank's part, ``output`` [output_tokens(M), K] is written when the result is waited
        for.  By default nothing is added: the output is a partial sum where the layer has several such ranks.
        """
        return Pending.done(None)
