"""Dispatch and combine by direct writes into other GPUs' memory, with device-side waits.

See :mod:`moe_core.kernels.ops.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_core._support.async_result import Pending
from moe_core.errors import CommunicationError
from moe_core.kernels.ops.exchange import (
    ExchangeBuffer,
    arrived_tokens,
    await_tokens,
    combine_results,
    push_results,
    push_tokens,
)
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.prepare_finalize.collective import CollectivePrepareAndFinalize
from moe_core.parallel.prepare_finalize.token_rows import Tokens


@dataclass(frozen=True, eq=False)
class PushedTokens:
    """Dispatch handle of a call.

    Attributes:
        buffer: Buffer of the call.
        experts: Experts of the rows in the buffer.
        places: Where the results of this rank's tokens arrive.
        release: Callback to run when the call has ended.
    """

    buffer: ExchangeBuffer
    experts: Tensor
    places: Tensor
    release: Callable[[], None]


def push(
    prepare_finalize: CollectivePrepareAndFinalize,
    tokens: Tokens,
    code: TokenCode,
    buffer: ExchangeBuffer,
    release: Callable[[], None],
) -> Pending[tuple[Tokens, object]]:
    """Begin to push tokens into a buffer of each rank; implements ``dispatch``.

    Args:
        prepare_finalize: The prepare/finalize of the call.
        tokens: Tokens of this rank.
        code: Encoding of the tokens.
        buffer: Buffer of the call.
        release: Callback to run when the call has ended.

    Returns:
        The pending tokens that arrive, and the handle for :func:`push_back`.
    """
    hidden, experts, weights, adapter_ids = tokens.hidden_states, tokens.experts, tokens.weights, tokens.adapter_ids
    destinations, shape, device = prepare_finalize.destinations, buffer.shape, experts.device
    places = torch.empty((hidden.shape[0], shape.ranks), dtype=torch.int32, device=device)

    def send() -> None:
        push_tokens(
            buffer,
            hidden,
            experts,
            weights,
            destinations.tables(device),
            code,
            copies=prepare_finalize.copies,
            offset=destinations.offset,
            adapter_ids=adapter_ids,
            places=places,
        )

    given = hidden, experts, weights, adapter_ids, places, buffer.addresses, buffer.state
    destinations.step(device, send, given, "push", shape, code)

    def finish() -> tuple[Tokens, object]:
        timeout = prepare_finalize.ranks.timeout.total_seconds()
        signals = buffer.signals(1), buffer.state, buffer.addresses
        destinations.step(device, lambda: await_tokens(buffer, timeout=timeout), signals, "wait")
        came = arrived_tokens(buffer, code)
        adapters = None if adapter_ids is None else came.adapters
        return (
            Tokens(came.hidden, came.scale, came.weights, came.experts, adapters),
            PushedTokens(buffer, came.experts, places, release),
        )

    return Pending(finish)


def push_back(
    prepare_finalize: CollectivePrepareAndFinalize, pushed: PushedTokens, output: Tensor, partial: Tensor
) -> Pending[None]:
    """Begin to push results back; implements ``combine``.

    Args:
        prepare_finalize: The prepare/finalize of the call.
        pushed: Handle returned by :func:`push`.
        output: ``[M, K]``, written when the result is waited for.
        partial: Results of the tokens that arrived.

    Returns:
        The pending result.
    """
    buffer, destinations, device = pushed.buffer, prepare_finalize.destinations, output.device
    given = partial, pushed.experts, buffer.addresses, buffer.state
    destinations.step(device, lambda: push_results(buffer, partial, pushed.experts), given, "push back", buffer.shape)

    def finish() -> None:
        timeout = prepare_finalize.ranks.timeout.total_seconds()
        came = output, pushed.places, buffer.results, buffer.signals(2), buffer.state, buffer.addresses
        destinations.step(
            device, lambda: combine_results(buffer, pushed.places, output, timeout=timeout), came, "combine"
        )
        if not output.is_meta:
            pushed.release()

    return Pending(finish)


def check_came(prepare_finalize: CollectivePrepareAndFinalize, missing: list[int]) -> None:
    """Raise if waits on the device have timed out.

    Args:
        prepare_finalize: The prepare/finalize of the calls.
        missing: Ranks for which a wait timed out.

    Raises:
        CommunicationError: There are such ranks.
    """
    if missing:
        names = [prepare_finalize.exchange.members[rank] for rank in missing]
        raise CommunicationError(
            f"tokens were exchanged ({prepare_finalize.name}), and ranks {names} did not come within "
            f"{prepare_finalize.ranks.timeout.total_seconds():g} s: they have died, hang, or make other calls (see "
            "their output); outputs since then are NaN; make the groups and layers anew on all ranks"
        )
