"""Launch configurations as a table: one row per range of rows per expert, and the choice of a row.

An element type lists its `Regime` rows from few rows per expert to many (`moe_core.kernels.gemm.heuristics.rules`). The
first row whose limits hold is chosen. Its limits are where the next taller tile becomes cheaper: a tile of `block_m`
rows streams an expert's weights once, and every further tile of that expert streams them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from moe_core.kernels.gemm.heuristics.cost import RESIDENT_4, RESIDENT_8, Loops, expected_tiles
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Rule for the number of programs that share a mainloop.
Split = Callable[[Loops], int]
#: k-loop steps above which a nearly empty tail wave costs more than another way of splitting.
LONG_LOOP = 20
#: Range of rows per expert that no call has.
NEVER = (inf, inf)


def within(*limits: tuple[int, int], below: float = inf) -> Split:
    """Return a rule that splits as far as one of the limits allows.

    Args:
        limits: (largest number of programs, fewest steps per program).
        below: Number of tiles from which loops stay whole.

    Returns:
        The rule.
    """
    return lambda loops: loops.split(*limits) if loops.tiles < below else 1


#: Rule that never splits.
WHOLE = within()


@dataclass(frozen=True)
class Change:
    """Fields of a configuration that differ in some calls.

    Attributes:
        where: Inclusive bounds, all of which must hold: "steps" of the mainloop, "depth" (steps per program), "split",
            "tiles", "programs" (tiles times split), and gemm1's "programs1".
        fields: Values of `TileConfig` fields.
    """

    where: Mapping[str, tuple[float, float]]
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Tile:
    """Launch configuration of one GEMM in one regime.

    Attributes:
        config: Tile configuration before split-K.
        split: Rule for the number of programs that share a mainloop.
        changes: Exceptions, in order; a later one overrides an earlier one.
        short: Mean rows per expert, from and up to which the warp-specialized kernel takes short tiles.
    """

    config: TileConfig
    split: Split = WHOLE
    changes: tuple[Change, ...] = ()
    short: tuple[float, float] = NEVER

    def at(self, loops: Loops, rows: float, programs1: int | None = None) -> TileConfig:
        """Return the tile configuration of this GEMM for one call.

        Args:
            loops: The GEMM's mainloops.
            rows: Mean rows per expert.
            programs1: Number of programs of gemm1; None if this is gemm1.

        Returns:
            The configuration.
        """
        split, (low, high) = self.split(loops), self.short
        values = {"steps": loops.steps, "depth": loops.steps // split, "split": split, "tiles": loops.tiles}
        programs = loops.tiles * split
        values |= {"programs": programs, "programs1": programs if programs1 is None else programs1}
        fields: dict[str, Any] = {"split_k": split, "short_tiles": low <= rows <= high}
        for change in self.changes:
            if all(least <= values[name] <= most for name, (least, most) in change.where.items()):
                fields |= change.fields
        return replace(self.config, **fields)


@dataclass(frozen=True)
class Regime:
    """Launch configurations for a range of rows per expert.

    Attributes:
        gemm1: The first GEMM.
        gemm2: The second GEMM; None if it is like the first.
        rows: Largest mean number of rows per expert.
        tiles: Largest expected number of tiles per expert, of gemm1's height.
        reached: Whether split-K counts the experts reached under uniform routing, instead of all that may be.
        taller: Tile of 16 rows for gemm1, taken in long mainloops where it fills the last wave better.
    """

    gemm1: Tile
    gemm2: Tile | None = None
    rows: float = field(default=inf, kw_only=True)
    tiles: float = field(default=inf, kw_only=True)
    reached: bool = field(default=False, kw_only=True)
    taller: TileConfig | None = field(default=None, kw_only=True)

    def covers(self, problem: LayerProblem, tokens: int) -> bool:
        """Whether a call is within the limits.

        Args:
            problem: Layer properties that do not change between calls.
            tokens: Number of tokens of the call.

        Returns:
            True if both limits hold.
        """
        if problem.rows_per_expert(tokens) > self.rows:
            return False
        return self.tiles == inf or expected_tiles(problem, tokens, self.gemm1.config.block_m) <= self.tiles

    def plan(self, problem: LayerProblem, tokens: int) -> TilePlan:
        """Return the launch configurations of a call.

        Args:
            problem: Layer properties that do not change between calls.
            tokens: Number of tokens of the call.

        Returns:
            Launch configurations of both GEMMs.
        """
        tile1, tile2, rows = self.gemm1, self.gemm2 or self.gemm1, problem.rows_per_expert(tokens)
        experts = problem.reached(tokens) if self.reached else min(tokens * problem.top_k, problem.num_experts)
        loops1 = Loops.of(problem, tokens, experts, tile1.config.block_n, first=True)
        loops2 = Loops.of(problem, tokens, experts, tile2.config.block_n, first=False)
        gemm1 = tile1.at(loops1, rows)
        if self.taller is not None and loops1.steps > LONG_LOOP and _fits_taller(loops1.tiles, gemm1.split_k):
            gemm1 = self.taller
        return TilePlan(gemm1, tile2.at(loops2, rows, loops1.tiles * gemm1.split_k))


def _fits_taller(tiles: int, split: int) -> bool:
    """Whether the tail wave of split 8-row tiles is nearly empty, but not that of 16-row tiles."""
    eight, sixteen = tiles * split / RESIDENT_8, tiles / RESIDENT_4
    return 2 < eight < 4 and eight % 1 < 0.25 and sixteen > 1 and sixteen % 1 > 0.6
