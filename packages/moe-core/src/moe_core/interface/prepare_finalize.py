"""Interface of prepare and finalize, and of the weighted reduction over top-k."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moe_core._support.async_result import AsyncResult
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
    """Inputs of a call for its M tokens, in addition to the hidden states.

    Attributes:
        topk_weights: [M, k] float32, contiguous.
        topk_ids: [M, k] int32 or int64, contiguous; ids that are not a valid expert select none.
        expert_map: [E] int32, local index of each expert, -1 if it is on another rank; None if ids are local indices.
        adapter_ids: [M] int32, if the call has LoRA adapters.
        tokens_per_rank: Number of tokens of each of the ``dp_size`` ranks, if the caller knows it.
        reserved: Result of :meth:`FusedMoEPrepareAndFinalizeModular.reserve`, if the call is recorded as a whole.
    """

    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None = None
    adapter_ids: Tensor | None = None
    tokens_per_rank: Sequence[int] | None = None
    reserved: ReservedCall | None = None


@dataclass(eq=False, slots=True)
class ReservedCall:
    """A call between ranks whose prepare, experts and finalize make only launches, and are recorded as one.

    Attributes:
        tensors: Tensors that the launches use, in addition to weights and workspace; always in the same order.
        kind: What determines the launches in addition to tensors.
        result: [M', K], where experts that reduce write their output.
        end: Callback that completes the call after the launches.
        step: Step of the host between the launches, if there is one: prepare passes it to
            :func:`moe_core.kernels.launch.launch.host_step`.
    """

    tensors: tuple[Tensor, ...]
    kind: tuple[Hashable, ...]
    result: Tensor
    end: Callable[[], None]
    step: Callable[[], None] | None


class TopKWeightAndReduce(ABC):
    """Reduction that applies router weights to per-expert results and sums them per token."""

    @abstractmethod
    def apply(self, output: Tensor, expert_output: Tensor, routing: TokenRouting, config: FusedMoEConfig) -> None:
        """Write the weighted sum of the expert results.

        Weights that are applied on the input (``config``) are not applied again. A (token, slot) pair whose id
        selects no local expert contributes nothing, whatever its row contains.

        Args:
            output: [M, K], written.
            expert_output: Expert results; the subclass defines the shape.
            routing: Routing of the rows of ``expert_output``.
            config: Configuration of the layer.
        """


@dataclass(frozen=True, eq=False)
class Prepared:
    """Result of prepare, which the experts get.

    Attributes:
        hidden_states: Standard format: [M', K]; batched: [E_local, T_max, K].
        routing: Routing of the M' tokens. Its ids belong to its ``expert_map``, which is the caller's, or None if
            prepare made the ids local. Its ``adapter_ids`` belong to the rows of the hidden states ([M'] or [E_local,
            T_max]).
        scale: Scale, if the hidden states were quantized.
        expert_tokens: Token counts; always set in the batched format. In the standard format set if M' and top-k do
            not imply the number of rows per expert.
    """

    hidden_states: Tensor
    routing: TokenRouting
    scale: Tensor | None = None
    expert_tokens: ExpertTokensMetadata | None = None


def rows_of_chosen(rows: int, every: int, config: FusedMoEConfig) -> ExpertTokensMetadata | None:
    """Describe the load of experts whose tokens were selected from a larger set.

    Args:
        rows: Number of selected tokens.
        every: Number of tokens they were selected from.
        config: Configuration of the layer.

    Returns:
        The metadata; None if all tokens were selected.
    """
    return None if every == rows else ExpertTokensMetadata(mean=every * config.top_k / config.num_experts)


class FusedMoEPrepareAndFinalizeModular(ABC):
    """Base class that moves hidden states to the experts (prepare) and results back (finalize).

    :meth:`prepare` and :meth:`finalize` are the steps of a call. Classes that communicate can also start a step and
    return an :class:`AsyncResult`, whose ``wait`` gives the result (:meth:`prepare_async`, :meth:`finalize_async`).
    Steps of several calls may be in flight; all ranks start and wait for them in the same order.

    Attributes:
        name: Name in ``FusedMoEParallelConfig.all2all_backend``.
        claims: What the class supports.
        activation_format: Layout of the hidden states that prepare produces.
        collective: Tokens cross ranks. Then every rank takes part in every call, even without tokens, and the tokens
            that prepare returns are not the caller's tokens in the caller's order.
        lora: Prepare passes adapter ids on.
        recordable: On the device, prepare and finalize only launch kernels, as
            :class:`~moe_core.interface.recordable.RecordableExperts` do.
        stateless: The promise of ``recordable`` follows from the layer's config alone.
        monolithic: The class needs only :meth:`sum_ranks`, which works with monolithic experts too.

    Args:
        config: Configuration of the layer.
        groups: Process groups of the layer's ranks (:class:`moe_core.parallel.distributed.ParallelGroups`). Required
            by classes that communicate, ignored by others.
        placement: Which ranks hold which experts; default: consecutive ones. Ignored by classes that do not
            communicate.
    """

    name: ClassVar[str] = ""
    claims: ClassVar[PrepareFinalizeClaims] = PrepareFinalizeClaims(frozenset(TokenSharing))
    activation_format: ClassVar[FusedMoEActivationFormat]
    collective: ClassVar[bool] = False
    lora: ClassVar[bool] = False
    recordable: bool = False
    stateless: ClassVar[bool] = False
    #: Whether prepare returns rows without a token: expert -1, arbitrary content.
    empty_rows: ClassVar[bool] = False
    #: Name of the class that replaces this one if :meth:`unavailable` reports that the ranks cannot use it.
    fallback: ClassVar[str] = ""
    monolithic: ClassVar[bool] = False
    #: Whether the class knows which experts this rank has, so that callers pass no expert map.
    maps_experts: bool = False
    #: Whether :meth:`sum_ranks` adds in place: its ``partial`` is its ``output``.
    sums_in_place: ClassVar[bool] = True

    #: Index of the layer within its groups, in order of creation; calls between ranks carry it.
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
        """List reasons against a layer, or against ``experts``, that the claims cannot express.

        Args:
            config: Configuration of the layer.
            experts: Experts class, or None for no class in particular.
            device: The device.

        Returns:
            The reasons; empty if there are none.
        """
        return []

    @classmethod
    def unsupported_reasons(
        cls,
        config: FusedMoEConfig,
        experts: type[FusedMoEExperts] | None,
        device: DeviceInfo,
        environment: Environment | None = None,
    ) -> list[str]:
        """List every reason why this class cannot serve a layer.

        This is a pure function: it does not use the process groups.

        Args:
            config: Configuration of the layer.
            experts: Experts class, or None for no class in particular.
            device: The device.
            environment: Installed software; default: that of this interpreter.

        Returns:
            The reasons; empty if it can.
        """
        found = cls.claims.reasons_against(config, device, environment or Environment.current())
        if config.activation_format is not cls.activation_format:
            found.append(
                f"returns the {cls.activation_format.value} activation format, but the experts take "
                f"{config.activation_format.value}"
            )
        if config.is_lora_enabled and not cls.lora:
            found.append("does not transfer adapter_ids (LoRA)")
        if experts is not None:
            if experts.is_monolithic and not cls.monolithic:
                found.append(f"{experts.__name__} is monolithic: it routes itself, after tokens have been dispatched")
            named = experts.claims.all2all
            if cls.collective and named is not None and cls.name not in named:
                found.append(f"{experts.__name__} does not work behind {cls.name}")
        return [*found, *cls.extra_reasons(config, experts, device)]

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in CUDA graphs; by default the claim decides."""
        return self.claims.cuda_graph

    def chosen_from(self, rows: int, handle: object = None) -> int:
        """Estimate the number of tokens from which the arriving rows were selected.

        The estimate is the mean over uniform routing. It exceeds ``rows`` if tokens arrive only at ranks that have
        one of their experts, and the other tokens have no rows.

        Args:
            rows: Number of rows that arrived.
            handle: Dispatch handle of the call; None: any call.

        Returns:
            Number of tokens.
        """
        return rows

    def arrivals(self) -> Iterator[None]:
        """Iterate over the ways in which tokens may arrive.

        During each iteration, calls on meta tensors are recorded with that way. There are several if it is not known
        before the first call.
        """
        yield

    def move_experts(self, placement: ExpertPlacement) -> None:
        """Send tokens according to a new placement, from the next call on.

        All ranks must switch between the same two calls. The weights are moved separately.

        Args:
            placement: The new placement.

        Raises:
            ConfigError: The placement does not fit, or the class has none.
        """
        raise ConfigError(f"{type(self).__name__} does not send tokens to other ranks")

    @classmethod
    def unavailable(cls, groups: ParallelGroups, device: torch.device, own: list[str]) -> list[str]:
        """List every reason why the ranks of ``groups`` together cannot use this class.

        If :attr:`fallback` is set, all ranks call this and get the same reasons.

        Args:
            groups: Process groups of the layer.
            device: The torch device of this rank.
            own: Result of :meth:`unsupported_reasons` on this rank.

        Returns:
            The reasons; empty if they can.
        """
        return own

    def max_tokens(self, num_tokens: int) -> int:
        """Maximum number of tokens that the experts can see, which sizes the workspace.

        Args:
            num_tokens: Number of tokens of a rank.

        Returns:
            Number of tokens.
        """
        return num_tokens

    def output_tokens(self, num_tokens: int) -> int:
        """Number of output rows of this rank.

        Args:
            num_tokens: Number of tokens of this rank.

        Returns:
            Number of rows.
        """
        return num_tokens

    def reserve(
        self, output: Tensor, hidden_states: Tensor, routing: TokenRouting, quantize_as: QuantKey | None
    ) -> ReservedCall | None:
        """Do what precedes the launches of a call with experts that reduce: exchange numbers, take memory.

        :meth:`prepare` and :meth:`finalize` get the result as ``routing.reserved`` and make only launches. They are
        recorded as one with the experts, and do not run when the record is replayed.

        Args:
            output: [M, K], written by the call.
            hidden_states: [M, K].
            routing: Routing of the tokens.
            quantize_as: Key to quantize the hidden states with; None: do not quantize.

        Returns:
            The call; None if more than launches would remain.
        """
        return None

    @abstractmethod
    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        """Move hidden states to the experts, in the experts' format.

        Args:
            hidden_states: [M, K].
            routing: Routing of the tokens.
            quantize_as: Key to quantize the hidden states with; None: do not quantize.
            static_scale: [1], if the key is static.

        Returns:
            What the experts get.
        """

    @abstractmethod
    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        """Move the expert results back.

        Args:
            output: [M, K], written.
            expert_output: Results of the experts for ``prepared``.
            prepared: Result of prepare.
            routing: The routing that was passed to prepare.
            reduce: Weighted reduction over top-k.
        """

    def prepare_async(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> AsyncResult[Prepared]:
        """Start :meth:`prepare`; by default it completes at once.

        Args:
            hidden_states: [M, K]. The tensors must not change until the result has been waited for.
            routing: As in :meth:`prepare`.
            quantize_as: As in :meth:`prepare`.
            static_scale: As in :meth:`prepare`.

        Returns:
            The pending result.
        """
        return AsyncResult.done(self.prepare(hidden_states, routing, quantize_as, static_scale))

    def finalize_async(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> AsyncResult[None]:
        """Start :meth:`finalize`; by default it completes at once.

        Args:
            output: [M, K], written when the result is waited for.
            expert_output: As in :meth:`finalize`.
            prepared: As in :meth:`finalize`.
            routing: As in :meth:`finalize`.
            reduce: As in :meth:`finalize`.

        Returns:
            The pending completion.
        """
        self.finalize(output, expert_output, prepared, routing, reduce)
        return AsyncResult.done(None)

    def sum_ranks(self, output: Tensor, partial: Tensor) -> None:  # noqa: B027 - an optional step
        """Add up the partial sums of ranks that have the same tokens.

        This is the last step of a call, for monolithic experts too. By default nothing is added: the output stays a
        partial sum if the layer has several such ranks.

        Args:
            output: [output_tokens(M), K], written.
            partial: [M, K], the partial sum of this rank.
        """
