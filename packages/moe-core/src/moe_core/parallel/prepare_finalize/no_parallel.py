"""Prepare/finalize without communication.

For tokens and experts on one rank, or for ranks that all hold every token and have an expert map.
"""

from __future__ import annotations

from torch import Tensor

from moe_core.interface.prepare_finalize import (
    FusedMoEPrepareAndFinalizeModular,
    Prepared,
    TokenRouting,
    TopKWeightAndReduce,
    rows_of_chosen,
)
from moe_core.interface.prepare_finalize_claims import PrepareFinalizeClaims
from moe_core.spec.config import FusedMoEActivationFormat, TokenSharing
from moe_core.spec.quant_key import QuantKey


class PrepareAndFinalizeNoParallel(FusedMoEPrepareAndFinalizeModular):
    """Standard format, no communication.

    A caller that dispatches the tokens of several ranks itself passes ``tokens_per_rank``: the numbers of tokens from
    which those of the call, which have a local expert, were selected.
    """

    name = "none"
    activation_format = FusedMoEActivationFormat.STANDARD
    # Ranks with the same tokens return partial sums, which the caller adds up.
    claims = PrepareFinalizeClaims(
        frozenset({TokenSharing.ALL}), batch_invariant=True, verified_on=("cpu", "NVIDIA H200 (sm90)")
    )
    lora = True
    recordable = True
    stateless = True

    def prepare(
        self,
        hidden_states: Tensor,
        routing: TokenRouting,
        quantize_as: QuantKey | None = None,
        static_scale: Tensor | None = None,
    ) -> Prepared:
        scale = None
        if quantize_as is not None:
            from moe_core.kernels.ops.quantize import quantize_activation

            hidden_states, scale = quantize_activation(hidden_states, quantize_as, static_scale=static_scale)
        counts = routing.tokens_per_rank
        expert_tokens = None if counts is None else rows_of_chosen(len(hidden_states), sum(counts), self.config)
        return Prepared(hidden_states, routing, scale, expert_tokens)

    def finalize(
        self,
        output: Tensor,
        expert_output: Tensor,
        prepared: Prepared,
        routing: TokenRouting,
        reduce: TopKWeightAndReduce,
    ) -> None:
        # Experts that reduce write the output itself.
        if expert_output is not output:
            reduce.apply(output, expert_output, routing, self.config)
