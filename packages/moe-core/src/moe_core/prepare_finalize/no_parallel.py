"""Tokens and experts on one rank (or every rank holding every token, with an expert map): nothing moves."""

from __future__ import annotations

from torch import Tensor

from moe_core.config import FusedMoEActivationFormat, TokenSharing
from moe_core.pending import Pending
from moe_core.prepare_finalize.base import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
)
from moe_core.prepare_finalize.claims import PrepareFinalizeClaims
from moe_core.quant_key import QuantKey


class PrepareAndFinalizeNoParallel(FusedMoEPrepareAndFinalizeModular):
    """Standard format, no communication."""

    name = "none"
    activation_format = FusedMoEActivationFormat.STANDARD
    # ranks whose tokens are the same give partial sums, which the caller adds up
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.ALL}), batch_invariant=True, verified_on=("cpu", "NVIDIA H200 (sm90)")
    )
    lora = True
    launches_only = True
    stateless = True

    def prepare_async(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Pending[Prepared]:
        scale = None
        if quantize_as is not None:
            from moe_core.ops.quantize import quantize_activation

            hidden_states, scale = quantize_activation(hidden_states, quantize_as, static_scale=static_scale)
        return Pending.done(Prepared(hidden_states, routing, scale))

    def finalize_async(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> Pending[None]:
        reduce.apply(output, expert_output, routing, self.config)
        return Pending.done(None)
