"""Measured launch configurations of one layer, in place of the heuristics' own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from moe_core.kernels.gemm.heuristics.gemv import GemvPlan
from moe_core.kernels.gemm.plan import TilePlan

P = TypeVar("P", TilePlan, GemvPlan)


@dataclass(frozen=True)
class TunedRange:
    """What was measured for ``first`` to ``last`` tokens: at ``last``, from the next lower measured number on.

    ``default_us``, ``best_us``: µs of a call with the heuristics' plan, and with ``plan``.
    """

    first: int
    last: int
    plan: TilePlan | GemvPlan
    default_us: float = 0.0
    best_us: float = 0.0


@dataclass(frozen=True)
class Tuned:
    """The ranges of a layer, which do not overlap; beyond them the heuristics choose."""

    ranges: tuple[TunedRange, ...]

    def at(self, tokens: int) -> TunedRange | None:
        """The range of so many tokens: that of the nearest measured number which is not smaller."""
        return next((one for one in self.ranges if one.first <= tokens <= one.last), None)

    def plan(self, kind: type[P], tokens: int) -> P | None:
        """The measured plan where it is of that kind."""
        found = self.at(tokens)
        return found.plan if found is not None and isinstance(found.plan, kind) else None
