"""Measured launch configurations of one layer, which replace the heuristics' choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from moe_core.kernels.gemm.plan import GemvPlan, TilePlan

P = TypeVar("P", TilePlan, GemvPlan)


@dataclass(frozen=True)
class TunedRange:
    """Measured plan for a range of token counts.

    The measurement was made at ``last``. The range starts after the next lower measured number of tokens.

    Attributes:
        first: Smallest number of tokens.
        last: Largest number of tokens.
        plan: The fastest plan measured.
        default_us: Time of a call with the heuristics' plan, in µs.
        best_us: Time of a call with ``plan``, in µs.
    """

    first: int
    last: int
    plan: TilePlan | GemvPlan
    default_us: float = 0.0
    best_us: float = 0.0


@dataclass(frozen=True)
class Tuned:
    """Measured ranges of a layer; the heuristics choose outside of them.

    Attributes:
        ranges: Ranges that do not overlap.
    """

    ranges: tuple[TunedRange, ...]

    def at(self, tokens: int) -> TunedRange | None:
        """Return the range that contains a number of tokens.

        Args:
            tokens: Number of tokens of the call.

        Returns:
            The range of the nearest measured number that is not smaller, or None.
        """
        return next((one for one in self.ranges if one.first <= tokens <= one.last), None)

    def plan(self, kind: type[P], tokens: int) -> P | None:
        """Return the measured plan if it is of the requested kind.

        Args:
            kind: `TilePlan` or `GemvPlan`.
            tokens: Number of tokens of the call.

        Returns:
            The plan, or None where none of that kind was measured.
        """
        found = self.at(tokens)
        return found.plan if found is not None and isinstance(found.plan, kind) else None
