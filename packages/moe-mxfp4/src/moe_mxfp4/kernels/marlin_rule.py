"""Launch parameters of e2m1 weights with 16-bit activations: the family's rule, and where they differ.

A number takes more instructions to widen than an integer, so that tiles with more rows pay sooner.  The figures are in
docs/design/mixed_input.md.
"""

from __future__ import annotations

from dataclasses import replace

from moe_core.gemm.marlin.rule import BLOCK_N, marlin_plan
from moe_core.gemm.plan import TileConfig, TilePlan


def e2m1_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    gated: bool = True,
    split: bool = True,
    capability: int = 90,
) -> TilePlan:
    """As :func:`moe_core.gemm.marlin.rule.marlin_plan`."""
    plan = marlin_plan(
        tokens,
        top_k,
        num_experts,
        hidden_size,
        intermediate_size,
        gated=gated,
        split=split,
        capability=capability,
    )
    mean = tokens * top_k / num_experts
    if not 90 <= capability < 120 or not 12 < mean <= 48:
        return plan
    if mean <= 24:
        few = TileConfig(32, BLOCK_N, 4, 4, 8, True, True)
        return TilePlan(few, few if plan.gemm2.block_m == 32 else plan.gemm2)
    return replace(plan, gemm1=TileConfig(64, BLOCK_N, 4, 3, 8, swap_ab=True))
