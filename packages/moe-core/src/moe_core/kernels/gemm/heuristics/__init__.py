"""Launch heuristics of every kernel family: (problem, tokens) -> launch configurations.

    problem.py    properties of a layer
    rules.py      tables of each element type: tiles, and up to how many rows per expert they are used
    regimes.py    what a row of a table states, and how a row becomes a plan
    cost.py       expected tiles, waves and mainloops of a call
    gemv.py       GEMV plans for small M
    invariant.py  what stays fixed for batch invariance
    tuned.py      measured plans, which replace these

This package does not import Triton: plans are data.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moe_core.kernels.gemm.heuristics.gemv import choose_gemv
from moe_core.kernels.gemm.heuristics.invariant import invariant_plan
from moe_core.kernels.gemm.heuristics.problem import Family, LayerProblem
from moe_core.kernels.gemm.heuristics.rules import regime_plan, rules_of
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan

__all__ = ["KERNELS", "Family", "LayerProblem", "gemv_plan", "launch_plan"]

#: Version of the kernels that the configurations were measured for. It is raised when a kernel changes so much that
#: earlier measurements (`moe tune`) no longer apply.
KERNELS = 10


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
    rules = rules_of(problem)
    plan = invariant_plan(regime_plan, problem, tokens) if problem.batch_invariant else regime_plan(problem, tokens)
    few = (
        tokens * problem.top_k <= rules.overlapping_pairs and problem.rows_per_expert(tokens) <= rules.overlapping_rows
    )
    return replace(plan if problem.may_split else plan.unsplit(), pdl=few and problem.capability >= 90)


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
    rules = rules_of(problem).gemv
    return None if rules is None or problem.batch_invariant else choose_gemv(rules, problem, tokens)
