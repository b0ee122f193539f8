"""Plans whose rows have the same bits for every number of tokens.

Found by comparing bits on an H200 (docs/design/batch_invariance.md):

- free: rows and columns of a tile, its warps, stages, order and tensor maps, which operand comes first, dependent
  launches; of int8 and of e4m3 with scales of blocks also the warp-specialised kernel
- fixed: whether k loops are split; tiles, and not a product without tensor cores; whether a step's product is summed by
  itself and how it is scaled; e4m3 with scales of rows takes no warp-specialised kernel, which sums in the tensor
  cores; nor that of 4-bit words, or short tiles, which were not compared

On other GPUs, where the height of a tile may choose the instruction, all numbers of tokens have one plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: rows per expert for which the one plan of a GPU is made whose bits were not compared: tiles of 32 rows
ROWS_PER_EXPERT = 24


def invariant_plan(heuristic: Callable[[LayerProblem, int], TilePlan], problem: LayerProblem, tokens: int) -> TilePlan:
    """The family's plan, with what a row's bits depend on fixed for all numbers of tokens."""
    if problem.capability != 90:
        tokens = max(ROWS_PER_EXPERT * problem.num_experts // problem.top_k, 1)
    plan = heuristic(problem, tokens).unsplit()
    return replace(plan, gemm1=_invariant(problem, plan.gemm1), gemm2=_invariant(problem, plan.gemm2))


def _invariant(problem: LayerProblem, config: TileConfig) -> TileConfig:
    config = replace(config, uniform=True, short_tiles=False)
    if not config.warp_specialised or sums_alike(problem):
        return config
    # the rest of the configuration has no registers for the product of a step
    return replace(config, block_m=min(config.block_m, 64), tma=True, num_stages=4, warp_specialised=False)


def sums_alike(problem: LayerProblem) -> bool:
    """Whether the warp-specialised kernel was seen to sum as the tile kernel does."""
    blocks = problem.element == "e4m3" and problem.group_size != -1
    return problem.family == "scaled_mm" and (problem.element == "int8" or blocks)
