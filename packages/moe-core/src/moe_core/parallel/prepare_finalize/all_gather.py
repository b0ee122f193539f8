"""Every rank gets all tokens and runs its experts; results are summed on the way back.

It uses few, large collectives whose shapes do not depend on the routing. This suits few ranks, many experts per token,
and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial as bound

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_core._support.async_result import Pending
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.kernels.ops.token_layout import TokenLayout
from moe_core.parallel.prepare_finalize.collective import CollectivePrepareAndFinalize, local_experts
from moe_core.parallel.prepare_finalize.fixed_order import sum_and_scatter
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.config import TokenSharing
from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True)
class _Rows:
    """Number of rows per rank in the gathered tensor; a rank fills as many as it has tokens."""

    most: int


class AllGatherPrepareAndFinalize(CollectivePrepareAndFinalize):
    """All-gather of the tokens, reduce-scatter of the results.

    Ranks are padded to the largest number of tokens with rows that have no expert. Under CUDA graph capture all ranks
    must bring the same number of tokens, unless ``tokens_per_rank`` states otherwise. In a replay, missing tokens of a
    rank are tokens whose expert ids are -1.
    """

    name = "allgather_reducescatter"
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.EP_RANK, TokenSharing.NONE}),
        quantizes=True,
        batch_invariant=True,
        verified_on=("cpu", "2 × NVIDIA H200 (sm90)"),
    )

    def dispatch(
        self, tokens: Tokens, tokens_per_rank: Sequence[int] | None, quantize_as: QuantKey | None, *, gaps: bool
    ) -> Pending[tuple[Tokens, object]]:
        from moe_core.kernels.ops._backend import use_triton

        most = max(self.counts(tokens.hidden_states, tokens_per_rank))
        pack = self._pack if use_triton(tokens.hidden_states, "auto") else self._pack_torch
        rows, unpack = pack(tokens, quantize_as, most)
        if rows.is_meta or not most:
            return Pending.done((unpack(rows), _Rows(most)))
        gathered = rows.new_empty(self.ranks.parallel.dp_size * most, rows.shape[1])
        gathering = self.exchange.begin("tokens are gathered (all-gather)", dist.all_gather_into_tensor, gathered, rows)

        def finish() -> tuple[Tokens, object]:
            gathering.wait()
            return unpack(gathered), _Rows(most)

        return Pending(finish)

    def _pack(
        self, tokens: Tokens, quantize_as: QuantKey | None, most: int
    ) -> tuple[Tensor, Callable[[Tensor], Tokens]]:
        """Pack tokens into ``most`` rows of bytes, padded with rows that have no expert, by kernels.

        Returns:
            The rows, and a function that unpacks those that arrive.
        """
        from moe_core.kernels.ops.dispatch import UnpackedTokens, pack_all, unpack

        hidden, ids, weights, adapter_ids = tokens.hidden_states, tokens.experts, tokens.weights, tokens.adapter_ids
        destinations, device, top_k = self.destinations, ids.device, ids.shape[1]
        tables, adapters = destinations.tables(device), adapter_ids is not None
        code = self.code(hidden, quantize_as)
        rows = hidden.new_empty((most, TokenLayout.rows(code, top_k, adapters=adapters).nbytes), dtype=torch.uint8)

        def leave() -> None:
            pack_all(
                hidden,
                ids,
                weights,
                tables,
                code,
                rows=most,
                offset=destinations.offset,
                adapter_ids=adapter_ids,
                out=rows,
            )

        destinations.step(device, leave, (hidden, ids, weights, adapter_ids, rows), "pack", code)

        def arrive(rows: Tensor) -> Tokens:
            found, held = UnpackedTokens.empty(rows, code, top_k, adapters=adapters), destinations.held(tables)
            parts = found.hidden, found.scale, found.weights, found.experts, found.adapters
            what = bound(unpack, rows, code, top_k, adapters=adapters, held=held, out=found)
            destinations.step(device, what, (rows, *parts[1:]), "unpack", code)
            return Tokens(*parts)

        return rows, arrive

    def _pack_torch(
        self, tokens: Tokens, quantize_as: QuantKey | None, most: int
    ) -> tuple[Tensor, Callable[[Tensor], Tokens]]:
        """The torch implementation of :meth:`_pack`."""
        tokens = tokens.quantized(quantize_as)
        stride = self.destinations.tables(tokens.experts.device).stride
        ranks, local = self.destinations.choose(tokens.experts)
        leaving = replace(tokens, experts=torch.where(ranks < 0, -1, ranks * stride + local))
        count = len(leaving.experts)
        rows = leaving.pack()
        if most > count:
            rows = F.pad(rows, (0, 0, 0, most - count))
            rows[count:, leaving.expert_bytes()] = 255  # -1: no expert

        def unpack(rows: Tensor) -> Tokens:
            found = leaving.unpack(rows)
            return replace(found, experts=local_experts(found.experts, stride, self.destinations.ep_rank))

        return rows, unpack

    def combine(self, output: Tensor, partial: Tensor, handle: object) -> Pending[None]:
        if not isinstance(handle, _Rows):
            raise TypeError(f"combine got {handle!r}, expected what dispatch returned")
        if partial.is_meta or not handle.most:
            return Pending.done(None)
        fixed = self.config.batch_invariant
        return sum_and_scatter(self.exchange, output, partial, handle.most, fixed_order=fixed)
