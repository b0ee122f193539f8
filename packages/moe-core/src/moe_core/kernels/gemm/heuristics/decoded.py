"""Launch configurations of weights that plain Triton operations decode: int4 to int8, and the as_stored layout.

Every product is transposed (`swap_ab`).  A number that was made of a code should enter as many products as registers
allow.
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
    """Of 8-bit activations (scaled_mm), or of wider ones (as_stored)."""
    as_stored, stepwise = problem.family == "as_stored", problem.group_size != -1
    mean, capability = problem.rows_per_expert(tokens), problem.capability
    if as_stored and problem.dtype_bytes == 4:
        return float32_plan()
    if lacks_shared_memory(capability) or problem.permuted:
        if not as_stored:
            return small_shared_plan(problem, tokens, most=32 if stepwise else 64)
        # scales of columns are gathered, which no pipeline hides; e2m1's enter the numbers
        most = 64 if not stepwise and problem.element != "e2m1" else 32 if capability else 16
        # where no NVIDIA GPU is meant, products of a step spill beside sums of 32 rows
        return small_shared_plan(problem, tokens, warps=(8, 8, 8), most=most)
    if mean <= 12:
        tiles = min(tokens * problem.top_k, problem.num_experts)
        gemm2_steps = steps_of(problem.intermediate_size)
        gemm1_split, gemm2_split = splits(problem, tokens, (RESIDENT, 4), (RESIDENT, 4))
        # two programs of eight warps on each of 132 multiprocessors, or four of four where there are more
        warps = 8 if tiles * gemm2_steps * gemm1_split <= RESIDENT else 4
        gemm1 = swapped(16, warps, 4, group=1, split=gemm1_split)
        gemm2 = swapped(16, warps, 2 if gemm2_steps <= 2 else 3, group=1, split=gemm2_split)
        return TilePlan(gemm1, gemm2)
    if mean <= 24:
        # four products of a step, or scales of its columns, take the registers of four warps
        wide = as_stored and (problem.group_size == 32 or (stepwise and problem.element == "e2m1"))
        config = swapped(32, 8 if wide else 4, 3, group=1)
        return TilePlan(config, config)
    few = swapped(64, 8, 3)
    # beyond sm_90 Triton multiplies int8 as sm_80 does, with both operands in registers; two accumulators of
    # 128 x 128 leave no registers for the product of a step
    if mean <= 48 or (stepwise if as_stored else capability != 90):
        return TilePlan(few, few)
    many = swapped(128, 8, 3)
    return TilePlan(few if stepwise else many, many if mean > 384 else few)
