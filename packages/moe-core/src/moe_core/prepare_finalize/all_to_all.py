"""Tokens go to the ranks of their experts only: each once per rank, however many of its experts are there.

What crosses ranks is smaller than with an all-gather where a token's experts are on few of them.  How many rows go
where depends on the routing, and the host has to know: this is the way for many tokens, not for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moe_core.config import TokenSharing
from moe_core.errors import ConfigError
from moe_core.pending import Pending
from moe_core.prepare_finalize.claims import PrepareFinalizeClaims
from moe_core.prepare_finalize.collective import CollectivePrepareAndFinalize
from moe_core.prepare_finalize.token_rows import Tokens
from moe_core.quant_key import QuantKey


@dataclass(frozen=True, eq=False)
class _Leaving:
    """Tokens that leave: ``packed`` rows in the order of ranks, ``like`` the parts of a row, ``left`` rows for each
    rank, ``came`` rows from each; ``places`` [M, ranks] int32: where a token's results come back, -1 for nowhere.
    """

    packed: Tensor
    like: Tokens
    left: list[int]
    came: list[int]
    places: Tensor


class AllToAllPrepareAndFinalize(CollectivePrepareAndFinalize):
    """All-to-all there, weighted sums back.

    A rank weights and sums what its experts make of a token, so that one row per token and rank comes back.  These rows
    are added in float32, ranks ascending: the same bits on every run.
    """

    name = "alltoall"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}),
        quantizes=True,
        cuda_graph=False,
        verified_on=("cpu",),
    )

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> Pending[tuple[Tokens, object]]:
        from moe_core.ops._backend import use_triton

        device = tokens.experts.device
        if device.type == "meta":
            came = replace(tokens.quantized(quantize_as), experts=tokens.experts.int())
            return Pending.done((came.unpack(came.pack()), None))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"all2all_backend {self.name!r} can't be captured in a CUDA graph, since the host must know how many "
                "tokens go where; take 'allgather_reducescatter' or 'low_latency' for calls in graphs"
            )
        pack = self._pack if use_triton(tokens.hidden_states, "auto") else self._pack_torch
        leaving = pack(tokens, quantize_as)
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
            return leaving.like.unpack(received), leaving

        return Pending(finish)

    def _pack(self, tokens: Tokens, quantize_as: QuantKey | None) -> _Leaving:
        """Counted, quantised and packed by kernels."""
        from moe_core.ops.dispatch import count_destinations, pack_tokens
        from moe_core.ops.token_layout import TokenCode

        hidden, ids = tokens.hidden_states, tokens.experts
        tables = self.destinations.tables(ids.device)
        where = {"copies": self.copies, "offset": self.destinations.offset}
        positions, counts = count_destinations(ids, tables, ranks=self.ranks.parallel.dp_size, **where)
        left, came = self._numbers(counts)
        code = TokenCode(hidden.shape[1], hidden.dtype, quantize_as)
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
        like = Tokens(
            hidden.new_empty((0, code.columns), dtype=code.code_dtype),
            None if quantize_as is None else hidden.new_empty((0, code.groups), dtype=code.scale_dtype),
            tokens.weights[:0],
            ids[:0].int(),
            None if tokens.adapter_ids is None else tokens.adapter_ids[:0],
        )
        return _Leaving(packed, like, left, came, places)

    def _pack_torch(self, tokens: Tokens, quantize_as: QuantKey | None) -> _Leaving:
        """The same bytes, by torch."""
        tokens, copies = tokens.quantized(quantize_as), self.copies
        ranks, local = self.destinations.choose(tokens.experts)
        # [M, ranks]: whether a token has an expert there
        wanted = (ranks[:, :, None] == torch.arange(self.ranks.parallel.ep_size, device=ranks.device)).any(1)
        wanted = wanted.repeat_interleave(copies, dim=1)
        left, came = self._numbers(wanted.sum(0, dtype=torch.int32))
        # rank by rank, tokens ascending
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
        return _Leaving(sent.pack(), sent, left, came, torch.where(wanted, place, -1).int())

    def _numbers(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """How many tokens leave for each rank (``counts`` [ranks] int32) and come from each, on the host."""
        incoming = torch.empty_like(counts)
        what = "ranks tell how many tokens they send (all-to-all)"
        self.exchange.begin(what, dist.all_to_all_single, incoming, counts).wait()
        numbers = self.exchange.numbers(torch.stack([counts, incoming]).flatten(), what)
        return numbers[: len(counts)], numbers[len(counts) :]

    def combine(self, output: Tensor, partial: Tensor, way_back: object) -> Pending[None]:
        if partial.is_meta:
            return Pending.done(None)
        if not isinstance(way_back, _Leaving):
            raise TypeError(f"combine got {way_back!r}, expected what dispatch returned")
        places, back = way_back.places, partial.new_empty(sum(way_back.left), partial.shape[1])
        what = "results are sent back (all-to-all)"
        moving = self.exchange.begin(what, dist.all_to_all_single, back, partial, way_back.left, way_back.came)

        def finish() -> None:
            from moe_core.ops._backend import use_triton
            from moe_core.ops.reduce import reduce_pairs, reduce_pairs_torch

            moving.wait()
            reduce = reduce_pairs if use_triton(output, "auto") else reduce_pairs_torch
            reduce(back, places, max(len(back), 1), output, rows=places.flatten())

        return Pending(finish)
