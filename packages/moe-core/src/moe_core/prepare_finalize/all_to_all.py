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


@dataclass(frozen=True, eq=False)
class _Routes:
    """Rows that left and came, per rank, and ``rows`` [M, ranks] int32: where each token's results come back."""

    left: list[int]
    came: list[int]
    wanted: Tensor
    rows: Tensor


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

    def dispatch(self, tokens: Tokens, tokens_per_rank: Sequence[int] | None) -> Pending[tuple[Tokens, object]]:
        device = tokens.experts.device
        if device.type == "meta":
            came = replace(tokens, experts=tokens.experts.int())
            return Pending.done((came.unpack(came.pack()), None))
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"all2all_backend {self.name!r} can't be captured in a CUDA graph, since the host must know how many "
                "tokens go where; take 'allgather_reducescatter' or 'low_latency' for calls in graphs"
            )
        ranks, local = self.destinations.choose(tokens.experts)
        copies = self._copies
        # [M, ranks]: whether a token has an expert there
        wanted = (ranks[:, :, None] == torch.arange(self.ranks.parallel.ep_size, device=device)).any(1)
        wanted = wanted.repeat_interleave(copies, dim=1)
        counts = wanted.sum(0)
        incoming = torch.empty_like(counts)
        what = "ranks tell how many tokens they send (all-to-all)"
        self.exchange.begin(what, dist.all_to_all_single, incoming, counts).wait()
        numbers = self.exchange.numbers(torch.stack([counts, incoming]).flatten(), what)
        left, came_counts = numbers[: len(counts)], numbers[len(counts) :]
        # rank by rank, tokens ascending
        place = wanted.T.flatten().cumsum(0).view(len(counts), -1).T - 1
        target, token = wanted.T.nonzero(as_tuple=True)
        own = ranks[token] == target.div(copies, rounding_mode="floor")[:, None]
        sent = Tokens(
            tokens.hidden_states[token],
            None if tokens.scale is None else tokens.scale[token],
            tokens.weights[token],
            torch.where(own, local[token], -1),
            None if tokens.adapter_ids is None else tokens.adapter_ids[token],
        )
        packed = sent.pack()
        received = packed.new_empty(sum(came_counts), packed.shape[1])
        what = "tokens are sent to the ranks of their experts (all-to-all)"
        moving = self.exchange.begin(what, dist.all_to_all_single, received, packed, came_counts, left)
        routes = _Routes(left, came_counts, torch.where(wanted, 0, -1).int(), place.int())

        def finish() -> tuple[Tokens, object]:
            moving.wait()
            return sent.unpack(received), routes

        return Pending(finish)

    def combine(self, output: Tensor, partial: Tensor, way_back: object) -> Pending[None]:
        if partial.is_meta:
            return Pending.done(None)
        if not isinstance(way_back, _Routes):
            raise TypeError(f"combine got {way_back!r}, expected what dispatch returned")
        routes, back = way_back, partial.new_empty(sum(way_back.left), partial.shape[1])
        what = "results are sent back (all-to-all)"
        moving = self.exchange.begin(what, dist.all_to_all_single, back, partial, routes.left, routes.came)

        def finish() -> None:
            from moe_core.ops._backend import use_triton
            from moe_core.ops.reduce import reduce_pairs, reduce_pairs_torch

            moving.wait()
            reduce = reduce_pairs if use_triton(output, "auto") else reduce_pairs_torch
            reduce(back, routes.wanted, 1, output, rows=routes.rows.flatten())

        return Pending(finish)

    @property
    def _copies(self) -> int:
        """How many ranks get each token that is sent to an expert-parallel rank."""
        parallel = self.ranks.parallel
        return parallel.tp_size if parallel.token_sharing is TokenSharing.NONE else 1
