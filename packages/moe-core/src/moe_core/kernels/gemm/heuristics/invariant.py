"""Plans whose rows have the same bits for every number of tokens.

Determined by comparing bits on an H200 (docs/design/batch_invariance.md):

- May vary: rows and columns of a tile, number of warps, stages, tile order, TMA descriptors, operand order and
  dependent launches. For int8, and for e4m3 with block scales, also the warp-specialized kernel.
- Must stay fixed: whether mainloops are split; tiles, as opposed to a GEMV without tensor cores; whether each step's
  product is summed separately, and how it is scaled. e4m3 with per-row scales must not use the warp-specialized kernel,
  which accumulates in the tensor cores. Its version for 4-bit words, and short tiles, were not compared.

On other GPUs the tile height may select the instruction. There, every number of tokens uses the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Rows per expert of the single plan used on GPUs whose bits were not compared: tiles of 32 rows.
ROWS_PER_EXPERT = 24


def invariant_plan(heuristic: Callable[[LayerProblem, int], TilePlan], problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the family's plan with everything fixed that a row's bits depend on.

    Args:
        heuristic: Heuristic of the kernel family.
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations whose rows have the same bits for every number of tokens.
    """
    if problem.capability != 90:
        tokens = max(ROWS_PER_EXPERT * problem.num_experts // problem.top_k, 1)
    plan = heuristic(problem, tokens).unsplit()
    return replace(plan, gemm1=_invariant(problem, plan.gemm1), gemm2=_invariant(problem, plan.gemm2))


def _invariant(problem: LayerProblem, config: TileConfig) -> TileConfig:
    config = replace(config, uniform=True, short_tiles=False)
    if not config.warp_specialized or sums_alike(problem):
        return config
    # The remaining fields of the configuration leave no registers for the product of a step.
    return replace(config, block_m=min(config.block_m, 64), tma=True, num_stages=4, warp_specialized=False)


def sums_alike(problem: LayerProblem) -> bool:
    """Whether the warp-specialized kernel is known to sum in the order of the tile kernel.

    Args:
        problem: Layer properties that do not change between calls.

    Returns:
        True for int8, and for e4m3 with block scales.
    """
    blocks = problem.element == "e4m3" and problem.group_size != -1
    return problem.family == "scaled_mm" and (problem.element == "int8" or blocks)
