"""Launch heuristics of every kernel family: (problem, tokens) -> launch configurations.

Rows per expert decide, their mean and how they scatter.  With few, a call streams weights: tiles of 16 or 32 rows, and
programs share the k loop of a tile (split-K) where tiles alone do not fill the device.  With many, the tensor cores
decide: the more rows a tile has, the more products a loaded or dequantised weight enters.  The figures behind the
thresholds are in docs/design.  No Triton here: plans are data.
"""

from __future__ import annotations

from functools import lru_cache

from moe_core.gemm.heuristics.decoded import decoded_plan
from moe_core.gemm.heuristics.gemv import GemvPlan, choose_gemv
from moe_core.gemm.heuristics.invariant import invariant_plan
from moe_core.gemm.heuristics.mixed_input import mixed_input_plan
from moe_core.gemm.heuristics.problem import Family, LayerProblem
from moe_core.gemm.heuristics.scaled_mm import scaled_mm_plan
from moe_core.gemm.plan import TilePlan

__all__ = ["KERNELS", "Family", "LayerProblem", "gemv_plan", "launch_plan"]

#: the state of the kernels that configurations are for: raised where one of them changes so that what was measured
#: before (`moe tune`) says nothing of it any more
KERNELS = 8

_HEURISTICS = {"scaled_mm": scaled_mm_plan, "mixed_input": mixed_input_plan, "as_stored": decoded_plan}


@lru_cache(maxsize=4096)
def launch_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """The plan of a layer for ``tokens``: the one look-up of every family."""
    heuristic = _HEURISTICS[problem.family]
    if problem.batch_invariant:
        return invariant_plan(heuristic, problem, tokens)
    plan = heuristic(problem, tokens)
    return plan if problem.may_split else plan.unsplit()


@lru_cache(maxsize=4096)
def gemv_plan(problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """As :func:`launch_plan`, of unsorted pairs: for one token, or a few that hardly share experts; or None."""
    return None if problem.batch_invariant else choose_gemv(problem, tokens)
