"""Every rank gets all tokens and computes its experts; results are added up on the way back.

Few, large calls that don't depend on where tokens go: the way for few ranks, for many experts per token, and for CUDA
graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_core.config import TokenSharing
from moe_core.pending import Pending
from moe_core.prepare_finalize.claims import PrepareFinalizeClaims
from moe_core.prepare_finalize.collective import CollectivePrepareAndFinalize, local_experts
from moe_core.prepare_finalize.token_rows import Tokens
from moe_core.quant_key import QuantKey


@dataclass(frozen=True)
class _Rows:
    """``most``: rows of each rank in what was gathered, of which it fills as many as it has tokens."""

    most: int


class AllGatherPrepareAndFinalize(CollectivePrepareAndFinalize):
    """All-gather of the tokens, reduce-scatter of the results.

    Ranks with fewer tokens than the one that has most fill up with rows of no expert.  Under CUDA-graph capture all
    ranks bring the same number of tokens, unless ``tokens_per_rank`` says otherwise; what a rank has less when the
    graph is replayed are tokens whose expert ids are -1.
    """

    name = "allgather_reducescatter"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}), quantizes=True, verified_on=("cpu",)
    )

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None
    ) -> Pending[tuple[Tokens, object]]:
        tokens = tokens.quantized(quantize_as)
        tables = self.destinations.tables(tokens.experts.device)
        ranks, local = self.destinations.choose(tokens.experts)
        leaving = replace(tokens, experts=torch.where(ranks < 0, -1, ranks * tables.stride + local))
        count = len(leaving.experts)
        most = max(self._counts(leaving, tokens_per_rank))
        rows = leaving.pack()
        if most > count:
            rows = F.pad(rows, (0, 0, 0, most - count))
            rows[count:, leaving.expert_bytes()] = 255  # -1: no expert
        if rows.is_meta or not most:
            return Pending.done((self._arrived(leaving, rows), _Rows(most)))
        gathered = rows.new_empty(self.ranks.parallel.dp_size * most, rows.shape[1])
        gathering = self.exchange.begin("tokens are gathered (all-gather)", dist.all_gather_into_tensor, gathered, rows)

        def finish() -> tuple[Tokens, object]:
            gathering.wait()
            return self._arrived(leaving, gathered), _Rows(most)

        return Pending(finish)

    def combine(self, output: Tensor, partial: Tensor, way_back: object) -> Pending[None]:
        if not isinstance(way_back, _Rows):
            raise TypeError(f"combine got {way_back!r}, expected what dispatch returned")
        if partial.is_meta or not way_back.most:
            return Pending.done(None)
        whole = output.shape[0] == way_back.most
        own = output if whole else partial.new_empty(way_back.most, partial.shape[1])
        summed = self.exchange.begin("results are added up (reduce-scatter)", dist.reduce_scatter_tensor, own, partial)

        def finish() -> None:
            summed.wait()
            if not whole:
                output.copy_(own[: output.shape[0]])

        return Pending(finish)

    def _arrived(self, leaving: Tokens, rows: Tensor) -> Tokens:
        found = leaving.unpack(rows)
        stride = self.destinations.tables(rows.device).stride
        return replace(found, experts=local_experts(found.experts, stride, self.destinations.ep_rank))

    def _counts(self, tokens: Tokens, given: Sequence[int] | None) -> Sequence[int]:
        """How many tokens each rank brings."""
        own, size = len(tokens.experts), self.ranks.parallel.dp_size
        if given is not None:
            return given
        device = tokens.experts.device
        if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return [own] * size
        what = "ranks tell how many tokens they bring (all-gather)"
        counts = torch.empty(size, dtype=torch.int64, device=device)
        self.exchange.begin(what, dist.all_gather_into_tensor, counts, counts.new_full((1,), own)).wait()
        return self.exchange.numbers(counts, what)
