"""Launch heuristics of every kernel family: (problem, tokens) -> launch configurations.

The number of rows per expert decides: its mean and its spread. With few rows, a call is bound by streaming weights.
Then tiles have 16 or 32 rows, and programs share the k loop of a tile (split-K) where the tiles alone do not fill the
device. With many rows, the tensor cores are the limit. Then taller tiles pay, because each loaded or dequantized weight
enters more products. The measurements behind the thresholds are in docs/design. This package does not import Triton:
plans are data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moe_core.kernels.gemm.heuristics.decoded import decoded_plan
from moe_core.kernels.gemm.heuristics.gemv import GemvPlan, choose_gemv
from moe_core.kernels.gemm.heuristics.invariant import invariant_plan
from moe_core.kernels.gemm.heuristics.mixed_input import mixed_input_plan
from moe_core.kernels.gemm.heuristics.problem import Family, LayerProblem
from moe_core.kernels.gemm.heuristics.scaled_mm import scaled_mm_plan
from moe_core.kernels.gemm.plan import TilePlan

__all__ = ["KERNELS", "Family", "LayerProblem", "gemv_plan", "launch_plan"]

#: Version of the kernels that the configurations were measured for. It is raised when a kernel changes so much that
#: earlier measurements (`moe tune`) no longer apply.
KERNELS = 9
#: Mean rows per expert up to which launches overlap (PDL). With more rows, launches are a small part of the time, and
#: programs that start early take resources from the kernel before them. OVERLAPPING_PAIRS is the limit in pairs where
#: int4 weights become int8.
OVERLAPPING_ROWS, OVERLAPPING_PAIRS = 128, 64

_HEURISTICS = {"scaled_mm": scaled_mm_plan, "mixed_input": mixed_input_plan, "as_stored": decoded_plan}


@lru_cache(maxsize=4096)
def launch_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the launch plan of a layer for a number of tokens.

    All kernel families look up their plans here.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations of both GEMMs.
    """
    heuristic = _HEURISTICS[problem.family]
    plan = invariant_plan(heuristic, problem, tokens) if problem.batch_invariant else heuristic(problem, tokens)
    return replace(plan if problem.may_split else plan.unsplit(), pdl=_overlaps(problem, tokens))


def _overlaps(problem: LayerProblem, tokens: int) -> bool:
    if problem.family == "scaled_mm" and problem.element in ("int4", "e2m1"):
        few = problem.element == "int4" and tokens * problem.top_k <= OVERLAPPING_PAIRS
    else:
        few = problem.rows_per_expert(tokens) <= OVERLAPPING_ROWS
    return few and problem.capability >= 90


@lru_cache(maxsize=4096)
def gemv_plan(problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """Return the GEMV plan of a layer for a few tokens, or None.

    The GEMV does not sort pairs. It suits one token, or a few tokens that hardly share experts.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan, or None where tiles are faster or results must be batch invariant.
    """
    return None if problem.batch_invariant else choose_gemv(problem, tokens)
