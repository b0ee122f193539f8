"""Candidate launch configurations for the search: neighbors of one configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from moe_core.kernels.gemm.heuristics import LayerProblem, launch_plan
from moe_core.kernels.gemm.heuristics.rules import with_registers
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan
from moe_core.kernels.tuning.limits import ASKED, NUMBERS, Plan, refusals

#: most influential fields first: split-K, pipeline stages, warps, tile sizes, L2 grouping, how weights are read
ORDER = (
    *("split_k", "num_stages", "num_warps", "block_m", "block_n", "block_w"),
    *("group_m", "tma", "max_registers", "swap_ab", "along_m"),
)


def neighbors(problem: LayerProblem, plan: Plan, first: int, last: int) -> Iterator[Plan]:
    """Yield valid plans that differ from ``plan`` in one respect.

    First come single steps of one field, of one GEMM or of both. Then come the heuristics' plans for other numbers of
    tokens, the nearest first, for one GEMM or for both. The same plan may be yielded twice.

    Args:
        problem: The layer.
        plan: The plan to start from.
        first: Smallest number of tokens per call.
        last: Largest number of tokens per call.

    Yields:
        Plans that are valid for calls with ``first`` to ``last`` tokens.
    """
    for other in (*_steps(problem, plan), *_own(problem, plan, last)):
        if other != plan and not refusals(problem, other, first, last):
            yield other


def _steps(problem: LayerProblem, plan: Plan) -> Iterator[Plan]:
    yield replace(plan, pdl=not plan.pdl)
    if isinstance(plan, GemvPlan):
        yield _with_finalize(problem, plan, not plan.fuse_finalize)
    known = {field.name for field in fields(plan.gemm1)}
    for name in ORDER:
        if name not in known:
            continue
        for turn in (0, 1):
            one, two = (_step(problem, config, name, turn) for config in (plan.gemm1, plan.gemm2))
            yield from (replace(plan, **changes) for changes in ({"gemm1": one}, {"gemm2": two}))
            # both GEMMs use the same sorted tiles
            yield replace(plan, gemm1=one, gemm2=two)


def _with_finalize(problem: LayerProblem, plan: GemvPlan, fused: bool) -> GemvPlan:
    """Fuse gemm2 with finalize or not, keeping the rows of each pair per program (at least 16)."""
    top_k, config = problem.top_k, plan.gemm2
    rows = config.block_n * top_k if fused else max(config.block_n // top_k, 16)
    config = replace(config, block_n=rows, num_warps=max(config.num_warps, top_k if fused else 1))
    return replace(plan, gemm2=config, fuse_finalize=fused)


def _step(problem: LayerProblem, config: Any, name: str, turn: int) -> Any:
    """Return ``config`` with the next value of ``name``, or the other boolean.

    Turn 0 gives the larger value, turn 1 the smaller one.
    """
    value = getattr(config, name)
    if name == "max_registers":
        return with_registers(problem, config) if value == 0 else replace(config, max_registers=0)
    if isinstance(value, bool):
        return replace(config, **{name: not value})
    if name == "num_stages":
        wanted = value + (1, -1)[turn]
    elif name == "group_m":
        # smaller steps change little
        wanted = value * 8 if turn == 0 else value // 8
    else:
        wanted = value * 2 if turn == 0 else value // 2
    low, high = NUMBERS[name]
    if not low <= wanted <= high:
        return config
    stepped = replace(config, **{name: wanted})
    # another tile needs another number of registers
    return with_registers(problem, stepped) if getattr(config, "max_registers", 0) else stepped


def _own(problem: LayerProblem, plan: Plan, tokens: int) -> Iterator[Plan]:
    near = sorted(ASKED, key=lambda count: max(count / tokens, tokens / count))
    own = list(dict.fromkeys(launch_plan(problem, count) for count in (tokens, *near)))
    yield from own
    if isinstance(plan, TilePlan):
        for other in own:
            yield replace(plan, gemm1=other.gemm1)
            yield replace(plan, gemm2=other.gemm2)
