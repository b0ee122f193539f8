"""Launch heuristics of every kernel family: (problem, tokens) -> launch configurations.

Rows per expert decide, their mean and how they scatter.  With few, a call streams weights: tiles of 16 or 32 rows, and
programs share the k loop of a tile (split-K) where tiles alone do not fill the device.  With many, the tensor cores
decide: the more rows a tile has, the more products a loaded or dequantised weight enters.  The figures behind the
thresholds are in docs/design.  No Triton here: plans are data.
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

#: the state of the kernels that configurations are for: raised where one of them changes so that what was measured
#: before (`moe tune`) says nothing of it any more
KERNELS = 9
#: rows per expert, in the mean, up to which launches overlap (PDL): with more, they are a small part of the time, and
#: programs that come early take room from the kernel before them; pairs, where int4 weights become int8
OVERLAPPING_ROWS, OVERLAPPING_PAIRS = 128, 64

_HEURISTICS = {"scaled_mm": scaled_mm_plan, "mixed_input": mixed_input_plan, "as_stored": decoded_plan}


@lru_cache(maxsize=4096)
def launch_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """The plan of a layer for ``tokens``: the one look-up of every family."""
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
    """As :func:`launch_plan`, of unsorted pairs: for one token, or a few that hardly share experts; or None."""
    return None if problem.batch_invariant else choose_gemv(problem, tokens)
