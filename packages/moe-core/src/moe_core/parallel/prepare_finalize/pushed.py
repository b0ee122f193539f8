"""Dispatch and combine by direct writes into other GPUs' memory, with device-side waits.

See :mod:`moe_core.kernels.ops.exchange`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial as bound
from typing import NamedTuple

import torch
from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core.errors import CommunicationError
from moe_core.interface.prepare_finalize import Prepared, ReservedCall, TokenRouting, TopKWeightAndReduce
from moe_core.kernels.ops.exchange import (
    ExchangeBuffer,
    ExchangeShape,
    arrived_tokens,
    await_tokens,
    combine_results,
    push_results,
    push_tokens,
)
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.prepare_finalize.collective import Arrived, CollectivePrepareAndFinalize
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.quant_key import QuantKey


class Form(NamedTuple):
    """Sizes of a call.

    Attributes:
        shape: Shape of the exchange.
        code: Encoding of the tokens.
        nbytes: Bytes of a buffer.
        kind: The same and what is constant for a rank, as values that are fast to compare.
    """

    shape: ExchangeShape
    code: TokenCode
    nbytes: int
    kind: tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class PushedTokens:
    """Dispatch handle of a call.

    Attributes:
        buffer: Buffer of the call.
        form: Sizes of the call.
        places: Where the results of this rank's tokens arrive, int32 ``[M, ranks]``.
        kind: What determines the launches in addition to tensors.
        release: Callback to run when the call has been launched.
    """

    buffer: ExchangeBuffer
    form: Form
    places: Tensor
    kind: tuple[Hashable, ...]
    release: Callable[[], None]


@dataclass(eq=False, slots=True)
class _WholeCall(ReservedCall):
    """A call that is recorded as a whole.

    Attributes:
        pushed: Its buffer.
    """

    pushed: PushedTokens


class PushedPrepareAndFinalize(CollectivePrepareAndFinalize):
    """Base of classes whose ranks write tokens and results into each other's memory.

    A call is four launches and the experts': push tokens, wait, push results, wait and add. Eager calls are recorded
    as a whole (:meth:`reserve`); in calls of separate steps each step is recorded.

    If a rank does not participate within the timeout of the groups, the output is NaN, and the next call raises
    CommunicationError.
    """

    @property
    @abstractmethod
    def missing(self) -> list[int]:
        """Ranks for which a wait on the device timed out, as far as the host knows."""

    @abstractmethod
    def take(
        self, hidden_states: Tensor, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> PushedTokens | None:
        """Take a buffer for a call, and exchange what the hosts must know for that.

        Args:
            hidden_states: Tokens of this rank.
            tokens_per_rank: Number of tokens of each rank, if the caller knows it.
            quantize_as: Quantization before dispatch; None for unquantized.

        Returns:
            The handle; None if the ranks cannot write into each other's memory.
        """

    def check(self) -> None:
        """Raise if a wait for a rank timed out, in a call or in a replay of a CUDA graph.

        It does not synchronize with the device.

        Raises:
            CommunicationError: A wait has timed out.
        """
        missing = self.missing
        if missing:
            names = [self.exchange.members[rank] for rank in missing]
            raise CommunicationError(
                f"dispatch or combine ({self.name}) timed out: ranks {names} did not arrive within "
                f"{self.ranks.timeout.total_seconds():g} s: they have died, hang, or make other calls (see their "
                "output); outputs since then are NaN; recreate the groups and layers on all ranks"
            )

    def form_of(self, capacity: int, hidden_states: Tensor, quantize_as: QuantKey | None) -> Form:
        """Return the sizes of a call.

        Args:
            capacity: Largest number of tokens that a rank brings.
            hidden_states: Tokens of this rank.
            quantize_as: Quantization before dispatch; None for unquantized.

        Returns:
            The sizes.
        """
        return self.form(capacity, hidden_states, quantize_as, bound(self._new_form, hidden_states.device))

    def _new_form(self, device: torch.device, capacity: int, code: TokenCode) -> Form:
        parallel, top_k = self.ranks.parallel, self.config.top_k
        shape = ExchangeShape(parallel.dp_size, capacity, code.columns, top_k, code.dtype)
        encoding = code.columns, code.dtype, code.code_dtype, code.scale_dtype, code.groups
        where = self.copies, self.destinations.offset, self.destinations.tables(device).stride
        kind = capacity, top_k, *encoding, parallel.dp_size, parallel.dp_rank, *where, self.ranks.timeout
        return Form(shape, code, shape.nbytes_of(code), kind)

    def handle(
        self, form: Form, buffer: ExchangeBuffer, hidden_states: Tensor, release: Callable[[], None]
    ) -> PushedTokens:
        """Return the handle of a call that has a buffer.

        Args:
            form: Sizes of the call.
            buffer: Its buffer.
            hidden_states: Tokens of this rank.
            release: Callback to run when the call has been launched.

        Returns:
            The handle.
        """
        shape = hidden_states.shape[0], form.shape.ranks
        places = torch.empty(shape, dtype=torch.int32, device=hidden_states.device)
        return PushedTokens(buffer, form, places, (*form.kind, buffer.shape.results_room), release)

    def reserve(
        self, output: Tensor, hidden_states: Tensor, routing: TokenRouting, quantize_as: QuantKey | None
    ) -> ReservedCall | None:
        taken = None
        if self.only_launches(quantize_as):
            taken = self.take(hidden_states, routing.tokens_per_rank, quantize_as)
        if taken is None:
            return None
        device, buffer = hidden_states.device, taken.buffer
        rows, tables = (taken.form.shape.rows, hidden_states.shape[1]), self.destinations.tables(device)
        result = torch.empty(rows, dtype=hidden_states.dtype, device=device)
        given = output, hidden_states, routing.topk_weights, routing.topk_ids, result, taken.places
        memory = buffer.memory, buffer.addresses, buffer.state, tables.slots, tables.counts
        return _WholeCall((*given, *memory), taken.kind, result, taken.release, None, taken)

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        call = routing.reserved
        if not isinstance(call, _WholeCall):
            return super().prepare(hidden_states, routing, quantize_as, static_scale)
        buffer, code = call.pushed.buffer, call.pushed.form.code
        self._push(call.pushed, Tokens(hidden_states, None, routing.topk_weights, routing.topk_ids))
        await_tokens(buffer, timeout=self._seconds)
        came = arrived_tokens(buffer, code)
        return Arrived(came.hidden, TokenRouting(came.weights, came.experts), came.scale, handle=call.pushed)

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        call = routing.reserved
        if not isinstance(call, _WholeCall):
            super().finalize(output, expert_output, prepared, routing, reduce)
            return
        push_results(call.pushed.buffer, expert_output, prepared.routing.topk_ids)
        combine_results(call.pushed.buffer, call.pushed.places, output, timeout=self._seconds)

    @property
    def _seconds(self) -> float:
        return self.ranks.timeout.total_seconds()

    def _push(self, call: PushedTokens, tokens: Tokens) -> None:
        push_tokens(
            call.buffer,
            tokens.hidden_states,
            tokens.experts,
            tokens.weights,
            self.destinations.tables(tokens.experts.device),
            call.form.code,
            copies=self.copies,
            offset=self.destinations.offset,
            adapter_ids=tokens.adapter_ids,
            places=call.places,
        )

    def push(self, tokens: Tokens, call: PushedTokens) -> AsyncResult[tuple[Tokens, object]]:
        """Begin to push tokens into the buffers of all ranks; implements ``dispatch``.

        Args:
            tokens: Tokens of this rank.
            call: Handle of the call.

        Returns:
            The pending tokens that arrive, and the handle for :meth:`push_back`.
        """
        buffer, destinations, device = call.buffer, self.destinations, tokens.experts.device
        given = tokens.hidden_states, tokens.experts, tokens.weights, tokens.adapter_ids, call.places
        state = buffer.state, buffer.addresses
        destinations.step(device, lambda: self._push(call, tokens), (*given, *state), "push", *call.kind)

        def finish() -> tuple[Tokens, object]:
            wait = bound(await_tokens, buffer, timeout=self._seconds)
            destinations.step(device, wait, (buffer.signals(1), *state), "wait")
            came = arrived_tokens(buffer, call.form.code)
            adapters = None if tokens.adapter_ids is None else came.adapters
            return Tokens(came.hidden, came.scale, came.weights, came.experts, adapters), call

        return AsyncResult(finish)

    def push_back(self, call: PushedTokens, output: Tensor, partial: Tensor) -> AsyncResult[None]:
        """Begin to push results back; implements ``combine``.

        Args:
            call: Handle returned by :meth:`push`.
            output: ``[M, K]``, written when the result is waited for.
            partial: Results of the tokens that arrived.

        Returns:
            The pending result.
        """
        buffer, destinations, device = call.buffer, self.destinations, output.device
        state, experts = (buffer.state, buffer.addresses), arrived_tokens(buffer, call.form.code).experts
        back = bound(push_results, buffer, partial, experts)
        destinations.step(device, back, (partial, experts, *state), "push back", *call.kind)

        def finish() -> None:
            add = bound(combine_results, buffer, call.places, output, timeout=self._seconds)
            came = output, call.places, buffer.results, buffer.signals(2), *state
            destinations.step(device, add, came, "combine")
            call.release()

        return AsyncResult(finish)
