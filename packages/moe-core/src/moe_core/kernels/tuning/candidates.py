"""Which launch configurations are worth a try, from one outwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from moe_core.kernels.gemm.heuristics import LayerProblem, launch_plan
from moe_core.kernels.gemm.heuristics.gemv import GemvPlan
from moe_core.kernels.gemm.heuristics.mixed_input import with_registers
from moe_core.kernels.gemm.plan import TilePlan
from moe_core.kernels.tuning.limits import ASKED, NUMBERS, Plan, refusals

#: what decides most first: parts of k loops, steps in flight, warps, tiles, what shares L2, how weights are read
ORDER = (
    *("split_k", "num_stages", "num_warps", "block_m", "block_n", "block_w"),
    *("group_m", "tma", "max_registers", "swap_ab", "along_m"),
)


def neighbours(problem: LayerProblem, plan: Plan, first: int, last: int) -> Iterator[Plan]:
    """Plans that differ from ``plan`` in one thing, and are possible for calls with ``first`` to ``last`` tokens.

    A step of one value of one GEMM, or of both; then what the heuristics choose for other numbers of tokens, the
    nearest first, for one GEMM or for both.  The same plan may come twice.
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
            # rows are sorted into tiles for both
            yield replace(plan, gemm1=one, gemm2=two)


def _with_finalize(problem: LayerProblem, plan: GemvPlan, fused: bool) -> GemvPlan:
    """``plan`` with as many rows of each pair in a program of gemm2, or the fewest, fused with finalize or not."""
    top_k, config = problem.top_k, plan.gemm2
    rows = config.block_n * top_k if fused else max(config.block_n // top_k, 16)
    config = replace(config, block_n=rows, num_warps=max(config.num_warps, top_k if fused else 1))
    return replace(plan, gemm2=config, fuse_finalize=fused)


def _step(problem: LayerProblem, config: Any, name: str, turn: int) -> Any:
    """``config`` with the next value of ``name``: the larger one first, or the other of two."""
    value = getattr(config, name)
    if name == "max_registers":
        return with_registers(problem, config) if value == 0 else replace(config, max_registers=0)
    if isinstance(value, bool):
        return replace(config, **{name: not value})
    if name == "num_stages":
        wanted = value + (1, -1)[turn]
    elif name == "group_m":
        # what lies between changes little
        wanted = value * 8 if turn == 0 else value // 8
    else:
        wanted = value * 2 if turn == 0 else value // 2
    low, high = NUMBERS[name]
    if not low <= wanted <= high:
        return config
    stepped = replace(config, **{name: wanted})
    # another tile has other registers
    return with_registers(problem, stepped) if getattr(config, "max_registers", 0) else stepped


def _own(problem: LayerProblem, plan: Plan, tokens: int) -> Iterator[Plan]:
    near = sorted(ASKED, key=lambda count: max(count / tokens, tokens / count))
    own = list(dict.fromkeys(launch_plan(problem, count) for count in (tokens, *near)))
    yield from own
    if isinstance(plan, TilePlan):
        for other in own:
            yield replace(plan, gemm1=other.gemm1)
            yield replace(plan, gemm2=other.gemm2)
