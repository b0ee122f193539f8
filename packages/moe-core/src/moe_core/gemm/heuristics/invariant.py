"""Plans whose rows have the same bits for every number of tokens.

What a plan may change without changing a row's sum, and what it may not, was found by comparing bits on an H200:

- free: how many rows and columns a tile has, its warps, stages, order and tensor maps, dependent launches
- fixed: whether k loops are split, whether tensor cores are used, the warp-specialised kernel, how products are scaled

On other GPUs the height of a tile may choose the instruction, so all numbers of tokens have one plan there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_core.gemm.heuristics.problem import LayerProblem
from moe_core.gemm.heuristics.tiles import BLOCK_N
from moe_core.gemm.plan import TileConfig, TilePlan

#: rows per expert for which the one plan of a GPU is made whose bits were not compared: tiles of 32 rows
ROWS_PER_EXPERT = 24


def invariant_plan(heuristic: Callable[[LayerProblem, int], TilePlan], problem: LayerProblem, tokens: int) -> TilePlan:
    """The family's plan, with what a row's bits depend on fixed for all numbers of tokens."""
    if problem.capability != 90:
        tokens = max(ROWS_PER_EXPERT * problem.num_experts // problem.top_k, 1)
    plan = heuristic(problem, tokens).unsplit()
    return replace(plan, gemm1=_invariant(problem, plan.gemm1), gemm2=_invariant(problem, plan.gemm2))


def _invariant(problem: LayerProblem, config: TileConfig) -> TileConfig:
    if problem.capability == 90 and not config.swap_ab:
        # few rows want the transposed product: so all have it
        block_n = min(config.block_n, BLOCK_N)
        config = TileConfig(64, block_n, 4, 3, 8, True, True)
    return replace(config, uniform=True)
