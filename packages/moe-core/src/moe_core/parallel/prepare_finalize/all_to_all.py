"""Send tokens only to the ranks of their experts, at most once per rank.

This moves fewer bytes than an all-gather if the experts of a token are on few ranks.

GPUs of one host that map each other's memory write tokens and results directly into it. Their buffers have room, for
each rank, for the largest number of tokens of any rank, and the routing stays on the device. Otherwise torch's
all-to-all moves rows without gaps, and the host waits for the routing, because it must know how many rows go where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial as bound
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core._support.async_result import AsyncResult
from moe_core.errors import ConfigError
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.kernels.ops.exchange import ExchangeBuffer
from moe_core.parallel.prepare_finalize.fixed_order import sum_parts
from moe_core.parallel.prepare_finalize.pushed import PushedPrepareAndFinalize, PushedTokens
from moe_core.parallel.prepare_finalize.token_rows import Tokens, unpacked
from moe_core.spec.config import FusedMoEConfig, TokenSharing
from moe_core.spec.quant_key import QuantKey

if TYPE_CHECKING:
    from moe_core.parallel.distributed.groups import ParallelGroups
    from moe_core.parallel.distributed.symmetric import ExchangeRoom
    from moe_core.parallel.placement.placement import ExpertPlacement


@dataclass(frozen=True, eq=False)
class _Leaving:
    """Packed tokens of an all-to-all, before it starts.

    Attributes:
        packed: Rows in the order of ranks.
        unpack: Function that unpacks the rows that arrive.
        left: Number of rows for each rank.
        came: Number of rows from each rank.
        places: Row at which each rank's result of a token arrives, int32 ``[M, ranks]``; -1 for none.
    """

    packed: Tensor
    unpack: Callable[[Tensor], Tokens]
    left: list[int]
    came: list[int]
    places: Tensor


class AllToAllPrepareAndFinalize(PushedPrepareAndFinalize):
    """All-to-all of the tokens; weighted sums return.

    Each rank weights and sums what its experts compute for a token, so one row per token and rank returns. These rows
    are added in float32, ranks ascending, which gives the same bits in every run.
    """

    name = "alltoall"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}),
        quantizes=True,
        batch_invariant=True,
        cuda_graph=False,
        verified_on=("cpu", "2 × NVIDIA H200 (sm90)"),
        notes="where GPUs share memory it can be captured in CUDA graphs",
    )
    #: Size limit in bytes of a buffer that other GPUs write into; larger calls use torch's all-to-all.
    most_shared = 4 * 2**30

    @property
    def capturable(self) -> bool:
        """Whether calls can be captured in CUDA graphs: GPUs share memory."""
        return self._room is not None

    def __init__(
        self,
        config: FusedMoEConfig,
        groups: ParallelGroups | None = None,
        *,
        placement: ExpertPlacement | None = None,
    ) -> None:
        super().__init__(config, groups, placement=placement)
        self._room: ExchangeRoom | None = None
        self._connected = False
        #: Whether launches are recorded as if GPUs shared memory.
        self._supposed = False

    def connect(self, device: torch.device) -> None:
        """Determine whether GPUs share memory; otherwise done by the first call.

        All ranks call it at the same time.

        Args:
            device: Device of this rank.

        Raises:
            ConfigError: A CUDA graph is being captured.
        """
        from moe_core.parallel.distributed.symmetric import ExchangeRoom

        if not self._connected and device.type == "cuda" and self.most_shared:
            if torch.cuda.is_current_stream_capturing():
                raise ConfigError("the first call maps the GPUs' shared memory: run one before capturing a CUDA graph")
            self._room = ExchangeRoom.connect(self.exchange, self.ranks, device)
            self.destinations.tables(device)
        self._connected = True

    def chosen_from(self, rows: int, handle: object = None) -> int:
        shared = self._room is not None or self._supposed
        pushed = isinstance(handle, PushedTokens) or (handle is None and shared)
        return rows if pushed else self.every_token(rows)

    def arrivals(self) -> Iterator[None]:
        yield
        if not self._connected:
            self._supposed = True
            try:
                yield
            finally:
                self._supposed = False

    @property
    def missing(self) -> list[int]:
        return [] if self._room is None else self._room.missing

    def take(
        self, hidden_states: Tensor, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> PushedTokens | None:
        if not hidden_states.is_meta:
            self.connect(hidden_states.device)
        room = self._room
        if room is None:
            return None
        form = self.form_of(max(1, *self.counts(hidden_states, tokens_per_rank)), hidden_states, quantize_as)
        if form.nbytes > self.most_shared:
            return None
        if hidden_states.is_meta:
            return self.handle(form, ExchangeBuffer.meta(form.shape), hidden_states, lambda: None)
        self.check()
        number, buffer = room.take(self.exchange, form.shape, form.code)
        return self.handle(form, buffer, hidden_states, bound(room.release, number))

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> AsyncResult[tuple[Tokens, object]]:
        # A scale that rows share would also cover rows without a token, which a buffer has.
        call = self.take(tokens.hidden_states, tokens_per_rank, quantize_as) if gaps else None
        return self._send(tokens, tokens_per_rank, quantize_as) if call is None else self.push(tokens, call)

    def _send(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> AsyncResult[tuple[Tokens, object]]:
        """Send tokens by torch's all-to-all."""
        from moe_core.kernels.ops._backend import use_triton

        device = tokens.experts.device
        if device.type == "meta":
            came = replace(tokens.quantized(quantize_as), experts=tokens.experts.int())
            return AsyncResult.done((came.unpack(came.pack()), None))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"all2all_backend {self.name!r} cannot be captured in a CUDA graph, since the host needs the "
                "token counts; use 'allgather_reducescatter' or 'low_latency' for calls in graphs"
            )
        pack = self._pack if use_triton(tokens.hidden_states, "auto") else self._pack_torch
        leaving = pack(tokens, tokens_per_rank, quantize_as)
        received = leaving.packed.new_empty(sum(leaving.came), leaving.packed.shape[1])
        moving = self.exchange.begin(
            "tokens are sent to the ranks of their experts (all-to-all)",
            dist.all_to_all_single,
            received,
            leaving.packed,
            leaving.came,
            leaving.left,
        )

        def finish() -> tuple[Tokens, object]:
            moving.wait()
            return leaving.unpack(received), leaving

        return AsyncResult(finish)

    def _pack(self, tokens: Tokens, given: Sequence[int] | None, quantize_as: QuantKey | None) -> _Leaving:
        """Count, quantize and pack tokens by kernels."""
        from moe_core.kernels.ops.dispatch import count_destinations, pack_tokens

        hidden, ids = tokens.hidden_states, tokens.experts
        tables = self.destinations.tables(ids.device)
        where = {"copies": self.copies, "offset": self.destinations.offset}
        positions, counts = count_destinations(ids, tables, ranks=self.ranks.parallel.dp_size, **where)
        left, came = self._numbers(counts, len(ids), given)
        code = self.code(hidden, quantize_as)
        packed, places = pack_tokens(
            hidden,
            ids,
            tokens.weights,
            tables,
            code,
            positions,
            counts,
            rows=sum(left),
            adapter_ids=tokens.adapter_ids,
            **where,
        )
        unpack = bound(unpacked, code=code, top_k=ids.shape[1], adapters=tokens.adapter_ids is not None)
        return _Leaving(packed, unpack, left, came, places)

    def _pack_torch(self, tokens: Tokens, given: Sequence[int] | None, quantize_as: QuantKey | None) -> _Leaving:
        """The torch implementation of :meth:`_pack`, with the same bytes."""
        tokens, copies = tokens.quantized(quantize_as), self.copies
        ranks, local = self.destinations.choose(tokens.experts)
        # [M, ranks]: whether a token has an expert on the rank.
        wanted = (ranks[:, :, None] == torch.arange(self.ranks.parallel.ep_size, device=ranks.device)).any(1)
        wanted = wanted.repeat_interleave(copies, dim=1)
        left, came = self._numbers(wanted.sum(0, dtype=torch.int32), len(ranks), given)
        # Rank by rank, tokens ascending.
        place = wanted.T.flatten().cumsum(0).view(wanted.shape[1], -1).T - 1
        target, token = wanted.T.nonzero(as_tuple=True)
        own = ranks[token] == target.div(copies, rounding_mode="floor")[:, None]
        sent = Tokens(
            tokens.hidden_states[token],
            None if tokens.scale is None else tokens.scale[token],
            tokens.weights[token],
            torch.where(own, local[token], -1),
            None if tokens.adapter_ids is None else tokens.adapter_ids[token],
        )
        return _Leaving(sent.pack(), sent.unpack, left, came, torch.where(wanted, place, -1).int())

    def _numbers(self, counts: Tensor, tokens: int, given: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Return on the host how many rows go to each rank, and how many come from each.

        Args:
            counts: Rows for each rank, int32 ``[ranks]``.
            tokens: Number of tokens of this rank.
            given: The caller's ``tokens_per_rank``, if any.
        """
        what = "ranks tell how many tokens they send"
        left = self.exchange.numbers(counts, what)
        _, rows = self.tell(tokens, given, what, left)
        return left, [row[self.ranks.parallel.dp_rank] for row in rows]

    def combine(self, output: Tensor, partial: Tensor, handle: object) -> AsyncResult[None]:
        if isinstance(handle, PushedTokens):
            return self.push_back(handle, output, partial)
        if partial.is_meta:
            return AsyncResult.done(None)
        if not isinstance(handle, _Leaving):
            raise TypeError(f"combine got {handle!r}, expected what dispatch returned")
        places, back = handle.places, partial.new_empty(sum(handle.left), partial.shape[1])
        what = "results are sent back (all-to-all)"
        moving = self.exchange.begin(what, dist.all_to_all_single, back, partial, handle.left, handle.came)

        def finish() -> None:
            moving.wait()
            sum_parts(back, places, output)

        return AsyncResult(finish)
