"""Tokens of one rank in the batched format: ``[E_local, T_max, K]`` and the rows in use.

This does locally what an all-to-all with per-expert buffers does between ranks, so that batched experts can run and be
tested without communication. It does not synchronize with the host; shapes are static.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_core.errors import TensorError
from moe_core.interface.experts import ExpertTokensMetadata
from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
)
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.spec.config import FusedMoEActivationFormat, TokenSharing
from moe_core.spec.quant_key import QuantKey


@dataclass(frozen=True, eq=False)
class BatchedPrepared(Prepared):
    """Prepared tokens in the batched format.

    Attributes:
        rows: Row of each (token, expert) pair in the flattened ``[E_local * T_max]`` buffer, int64 ``[M, k]``; -1 for
            none. Pairs of a token with the same expert have the same row.
    """

    rows: Tensor | None = None


class BatchedPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):
    """Scatter tokens to per-expert buffers, gather weighted results back.

    ``T_max`` is the config's ``max_num_tokens``, by default the number of tokens. This is always enough, because pairs
    of a token with the same expert share one row.
    """

    name = "batched"
    activation_format = FusedMoEActivationFormat.BATCHED
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.ALL}), quantizes=True, batch_invariant=True, verified_on=("cpu", "NVIDIA H200 (sm90)")
    )
    lora = True

    def max_tokens(self, num_tokens: int) -> int:
        return self._capacity(num_tokens)

    def _capacity(self, tokens: int) -> int:
        most = self.config.max_num_tokens
        if most is not None and tokens > most:
            raise TensorError(
                f"hidden_states has {tokens} tokens, expected at most max_num_tokens = {most} of the config"
            )
        return tokens if most is None else most

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        from moe_core.reference.torch_experts import local_expert_ids

        config, topk_ids, adapters = self.config, routing.topk_ids, routing.adapter_ids
        tokens, top_k = topk_ids.shape
        experts, capacity, width = config.local_experts, self._capacity(tokens), hidden_states.shape[1]
        if config.apply_router_weight_on_input:
            hidden_states = (hidden_states.float() * routing.topk_weights).to(hidden_states.dtype)
        local = local_expert_ids(topk_ids, config.num_experts, experts, routing.expert_map)
        same = local[:, :, None] == local[:, None, :]
        first = same.to(torch.uint8).argmax(
            dim=2
        )  # per pair: first pair of the token with the same expert, which owns the row
        ids = torch.where(first == torch.arange(top_k, device=local.device), local, -1).flatten()
        sorted_ids, order = torch.sort(ids, stable=True)
        bounds = torch.searchsorted(sorted_ids, torch.arange(experts + 1, device=ids.device))
        place = torch.arange(ids.numel(), device=ids.device) - bounds[sorted_ids.clamp(min=0)]
        keep = sorted_ids >= 0
        # Pairs that own no row go to an extra row behind the buffer, so that shapes do not depend on their number.
        row = torch.where(keep, sorted_ids * capacity + place, experts * capacity)
        buffer = hidden_states.new_zeros(experts * capacity + 1, width)
        buffer[row] = hidden_states[order // top_k]
        if adapters is not None:
            of_rows = adapters.new_full((experts * capacity + 1,), -1)
            of_rows[row] = adapters[order // top_k]
            routing = replace(routing, adapter_ids=of_rows[:-1].view(experts, capacity))
        rows = torch.empty_like(ids)
        rows[order] = torch.where(keep, row, -1)
        batched = buffer[:-1].view(experts, capacity, width)
        scale = None
        if quantize_as is not None:
            from moe_core.kernels.ops.quantize import quantize_activation

            q, flat_scale = quantize_activation(buffer[:-1], quantize_as, static_scale=static_scale)
            batched, scale = q.view(experts, capacity, -1), flat_scale
            if scale.shape[0] == experts * capacity:  # otherwise one scale for all
                scale = scale.view(experts, capacity, -1)
        counts = (bounds[1:] - bounds[:-1]).to(torch.int32)
        rows = rows.view(tokens, top_k).gather(1, first)
        return BatchedPrepared(batched, routing, scale, ExpertTokensMetadata(counts), rows)

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        if not isinstance(prepared, BatchedPrepared) or prepared.rows is None:
            raise TypeError(f"finalize got {type(prepared).__name__}, expected what this object's prepare returned")
        from moe_core.kernels.ops._backend import use_triton
        from moe_core.kernels.ops.reduce import reduce_pairs, reduce_pairs_torch

        # Pairs are added in ascending order, so that a token's sum does not depend on the number of other tokens.
        (reduce_pairs if use_triton(output, "auto") else reduce_pairs_torch)(
            expert_output.flatten(0, 1),
            routing.topk_ids,
            self.config.local_experts,
            output,
            topk_weights=None if self.config.apply_router_weight_on_input else routing.topk_weights,
            expert_map=routing.expert_map,
            rows=prepared.rows.flatten().int(),
        )
