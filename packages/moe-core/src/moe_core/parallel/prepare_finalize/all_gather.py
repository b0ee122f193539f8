"""Every rank gets all tokens and runs its experts; results are summed on the way back.

It uses few, large collectives whose shapes do not depend on the routing. This suits few ranks, many experts per token,
and CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial as bound
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moe_core._support.async_result import AsyncResult
from moe_core.interface.prepare_finalize import Prepared, ReservedCall, TokenRouting, TopKWeightAndReduce
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.kernels.launch.launch import host_step
from moe_core.kernels.ops.token_layout import TokenCode, TokenLayout
from moe_core.parallel.prepare_finalize.collective import Arrived, CollectivePrepareAndFinalize, local_experts
from moe_core.parallel.prepare_finalize.fixed_order import sum_and_scatter
from moe_core.parallel.prepare_finalize.token_rows import Tokens
from moe_core.spec.config import TokenSharing
from moe_core.spec.quant_key import QuantKey
from moe_core.spec.workspace import WorkspaceLayout

if TYPE_CHECKING:
    from moe_core.kernels.ops.dispatch import UnpackedTokens


#: Clause for errors.
_GATHER = "tokens are gathered (all-gather)"


@dataclass(frozen=True)
class _Rows:
    """Number of rows per rank in the gathered tensor; a rank fills as many as it has tokens."""

    most: int


class _Form(NamedTuple):
    """Sizes of a call.

    Attributes:
        code: Encoding of the tokens.
        nbytes: Bytes of a row.
        layout: Layout of what is unpacked.
        kind: What determines the launches in addition to tensors.
    """

    code: TokenCode
    nbytes: int
    layout: WorkspaceLayout
    kind: tuple[Hashable, ...]


@dataclass(eq=False, slots=True)
class _WholeCall(ReservedCall):
    """A call that is recorded as a whole.

    Attributes:
        own: Rows of this rank, uint8 ``[most, bytes]``.
        rows: Rows of all ranks, uint8 ``[R, bytes]``.
        parts: Memory of what is unpacked, uint8.
        form: Sizes of the call.
    """

    own: Tensor
    rows: Tensor
    parts: Tensor
    form: _Form


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
    ) -> AsyncResult[tuple[Tokens, object]]:
        from moe_core.kernels.ops._backend import use_triton

        most = max(self.counts(tokens.hidden_states, tokens_per_rank))
        pack = self._pack if use_triton(tokens.hidden_states, "auto") else self._pack_torch
        rows, unpack = pack(tokens, quantize_as, most)
        if rows.is_meta or not most:
            return AsyncResult.done((unpack(rows), _Rows(most)))
        gathered = rows.new_empty(self.ranks.parallel.dp_size * most, rows.shape[1])
        gathering = self.exchange.begin(_GATHER, dist.all_gather_into_tensor, gathered, rows)

        def finish() -> tuple[Tokens, object]:
            gathering.wait()
            return unpack(gathered), _Rows(most)

        return AsyncResult(finish)

    def reserve(
        self, output: Tensor, hidden_states: Tensor, routing: TokenRouting, quantize_as: QuantKey | None
    ) -> ReservedCall | None:
        most = 0
        if self.only_launches(quantize_as):
            most = max(self.counts(hidden_states, routing.tokens_per_rank))
        if not most:
            return None
        form = self.form(most, hidden_states, quantize_as, bound(self._new_form, hidden_states.device))
        tables, count = self.destinations.tables(hidden_states.device), self.exchange.size * most
        own = hidden_states.new_empty((most, form.nbytes), dtype=torch.uint8)
        rows, parts = own.new_empty((count, form.nbytes)), own.new_empty(form.layout.nbytes)
        result = hidden_states.new_empty((count, form.code.columns))
        given = hidden_states, routing.topk_weights, routing.topk_ids, own, rows, parts, result
        gather, end = bound(self.exchange.all_gather, _GATHER, rows, own), bound(self._scatter, output, result, most)
        return _WholeCall((*given, tables.slots, tables.counts), form.kind, result, end, gather, own, rows, parts, form)

    def _new_form(self, device: torch.device, most: int, code: TokenCode) -> _Form:
        from moe_core.kernels.ops.dispatch import UnpackedTokens

        top_k, held = self.config.top_k, self.destinations.held(self.destinations.tables(device))
        layout = WorkspaceLayout(UnpackedTokens.specs(self.exchange.size * most, code, top_k))
        encoding = code.columns, code.code_dtype, code.scale_dtype, code.groups, top_k
        kind = *encoding, most, self.destinations.offset, *held
        return _Form(code, TokenLayout.rows(code, top_k).nbytes, layout, kind)

    def _scatter(self, output: Tensor, result: Tensor, most: int) -> None:
        fixed = self.config.batch_invariant
        sum_and_scatter(self.exchange, output, result, most, fixed_order=fixed, overlap=False).wait()

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
        from moe_core.kernels.ops.dispatch import UnpackedTokens

        self._pack_into(call.own, Tokens(hidden_states, None, routing.topk_weights, routing.topk_ids), call.form.code)
        if call.step is not None:
            host_step(call.step)
        found = UnpackedTokens.inside(call.rows, call.form.code, call.form.layout.tensors(call.parts))
        self._unpack(call.rows, call.form.code, found)
        return Arrived(found.hidden, TokenRouting(found.weights, found.experts), found.scale)

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        # A call with reserved buffers reduce-scatters its results when it ends, not here.
        if routing.reserved is None:
            super().finalize(output, expert_output, prepared, routing, reduce)

    def _pack(
        self, tokens: Tokens, quantize_as: QuantKey | None, most: int
    ) -> tuple[Tensor, Callable[[Tensor], Tokens]]:
        """Pack tokens into ``most`` rows of bytes, padded with rows that have no expert, by kernels.

        Returns:
            The rows, and a function that unpacks those that arrive.
        """
        from moe_core.kernels.ops.dispatch import UnpackedTokens

        code = self.code(tokens.hidden_states, quantize_as)
        device, top_k, adapters = tokens.experts.device, tokens.experts.shape[1], tokens.adapter_ids is not None

        def arrive(rows: Tensor) -> Tokens:
            found = UnpackedTokens.empty(rows, code, top_k, adapters=adapters)
            parts = found.hidden, found.scale, found.weights, found.experts, found.adapters
            self.destinations.step(device, bound(self._unpack, rows, code, found), (rows, *parts[1:]), "unpack", code)
            return Tokens(*parts)

        return self._packed(tokens, code, most), arrive

    def _packed(self, tokens: Tokens, code: TokenCode, most: int) -> Tensor:
        """The rows of :meth:`_pack`."""
        ids, adapter_ids = tokens.experts, tokens.adapter_ids
        layout = TokenLayout.rows(code, ids.shape[1], adapters=adapter_ids is not None)
        rows = tokens.hidden_states.new_empty((most, layout.nbytes), dtype=torch.uint8)
        given = tokens.hidden_states, ids, tokens.weights, adapter_ids, rows
        self.destinations.step(ids.device, bound(self._pack_into, rows, tokens, code), given, "pack", code)
        return rows

    def _pack_into(self, rows: Tensor, tokens: Tokens, code: TokenCode) -> None:
        from moe_core.kernels.ops.dispatch import pack_all

        hidden, ids, destinations = tokens.hidden_states, tokens.experts, self.destinations
        pack_all(
            hidden,
            ids,
            tokens.weights,
            destinations.tables(ids.device),
            code,
            rows=len(rows),
            offset=destinations.offset,
            adapter_ids=tokens.adapter_ids,
            out=rows,
        )

    def _unpack(self, rows: Tensor, code: TokenCode, found: UnpackedTokens) -> None:
        from moe_core.kernels.ops.dispatch import unpack

        held = self.destinations.held(self.destinations.tables(rows.device))
        unpack(rows, code, found.weights.shape[1], adapters=found.adapters is not None, held=held, out=found)

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

    def combine(self, output: Tensor, partial: Tensor, handle: object) -> AsyncResult[None]:
        if not isinstance(handle, _Rows):
            raise TypeError(f"combine got {handle!r}, expected what dispatch returned")
        if partial.is_meta or not handle.most:
            return AsyncResult.done(None)
        fixed = self.config.batch_invariant
        return sum_and_scatter(self.exchange, output, partial, handle.most, fixed_order=fixed)
