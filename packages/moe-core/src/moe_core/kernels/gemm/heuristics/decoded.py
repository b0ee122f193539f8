"""Launch configurations for weights that plain Triton operations decode.

These are int4 weights that become int8, and the as_stored layout. Every product is transposed (`swap_ab`). Each decoded
value should enter as many products as registers allow.
"""

from __future__ import annotations

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.tiles import (
    RESIDENT,
    float32_plan,
    lacks_shared_memory,
    small_shared_plan,
    splits,
    steps_of,
    swapped,
)
from moe_core.kernels.gemm.plan import TilePlan


def decoded_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the plan for 8-bit activations (scaled_mm) or wider ones (as_stored).

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations of both GEMMs.
    """
    as_stored, stepwise = problem.family == "as_stored", problem.group_size != -1
    mean, capability = problem.rows_per_expert(tokens), problem.capability
    if as_stored and problem.dtype_bytes == 4:
        return float32_plan()
    if lacks_shared_memory(capability) or problem.permuted:
        if not as_stored:
            return small_shared_plan(problem, tokens, most=32 if stepwise else 64)
        # Per-column scales are gathered, which no pipeline hides. Scales of e2m1 are applied to the values.
        most = 64 if not stepwise and problem.element != "e2m1" else 32 if capability else 16
        # Without an NVIDIA GPU, the products of a step spill next to sums of 32 rows.
        return small_shared_plan(problem, tokens, warps=(8, 8, 8), most=most)
    if mean <= 12:
        tiles = min(tokens * problem.top_k, problem.num_experts)
        gemm2_steps = steps_of(problem.intermediate_size)
        gemm1_split, gemm2_split = splits(problem, tokens, (RESIDENT, 4), (RESIDENT, 4))
        # Two programs of eight warps on each of 132 SMs, or four of four warps if there are more programs.
        warps = 8 if tiles * gemm2_steps * gemm1_split <= RESIDENT else 4
        gemm1 = swapped(16, warps, 4, group=1, split=gemm1_split)
        gemm2 = swapped(16, warps, 2 if gemm2_steps <= 2 else 3, group=1, split=gemm2_split)
        return TilePlan(gemm1, gemm2)
    if mean <= 24:
        # The four products of a step, or the scales of its columns, need more registers than four warps have.
        wide = as_stored and (problem.group_size == 32 or (stepwise and problem.element == "e2m1"))
        config = swapped(32, 8 if wide else 4, 3, group=1)
        return TilePlan(config, config)
    few = swapped(64, 8, 3)
    # Beyond sm_90, Triton multiplies int8 as on sm_80, with both operands in registers. Two accumulators of 128 x
    # 128 leave no registers for the product of a step.
    if mean <= 48 or (stepwise if as_stored else capability != 90):
        return TilePlan(few, few)
    many = swapped(128, 8, 3)
    return TilePlan(few if stepwise else many, many if mean > 384 else few)
