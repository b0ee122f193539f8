"""Cost of a call: expected tiles, split-K, and time of launches and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_core.kernels.gemm.heuristics.problem import LayerProblem

#: Columns of a tile and depth of a k-loop step, unless the scales require others.
BLOCK_N = 128
#: Largest number of float32 partial sums of a split-K GEMM: 528 programs, 16 rows, two halves of 128 columns.
MAX_PARTIALS = 528 * 16 * 2 * 128
#: SMs of an H100 and of an H200, where the constants were measured.
MULTIPROCESSORS = 132
#: Resident programs: of eight warps, of four warps, and of four warps with tiles of 8 rows.
RESIDENT, RESIDENT_4, RESIDENT_8 = 2 * MULTIPROCESSORS, 4 * MULTIPROCESSORS, 5 * MULTIPROCESSORS


def steps_of(columns: int, depth: int = BLOCK_N) -> int:
    """Return the number of k-loop steps over ``columns``, or of tiles over as many rows.

    Args:
        columns: Number of columns or rows.
        depth: Columns of a step, or rows of a tile.

    Returns:
        ``columns / depth``, rounded up.
    """
    return -(-columns // depth)


def expected_tiles(problem: LayerProblem, tokens: int, rows: int) -> float:
    """Return the expected number of tiles per expert, under uniform routing.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.
        rows: Rows of a tile.

    Returns:
        The mean number of tiles that an expert has.
    """
    if not tokens:
        return 0.0
    share = problem.top_k / problem.num_experts
    mean, spread = tokens * share, math.sqrt(2 * tokens * share * max(1 - share, 1e-3))
    return sum(math.erfc((i * rows + 0.5 - mean) / spread) / 2 for i in range(int(mean / rows) + 4))


@dataclass(frozen=True)
class Loops:
    """The mainloops of one GEMM in one call, as split-K sees them.

    Attributes:
        tiles: Number of output tiles, one per expert with rows.
        steps: Number of steps of each mainloop.
        weights: Bytes of weights that the call reads.
        sums: Number of results. Split-K has a float32 partial sum of each per split.
    """

    tiles: int
    steps: int
    weights: float
    sums: int

    @staticmethod
    def of(problem: LayerProblem, tokens: int, experts: float, block: int, *, first: bool) -> Loops:
        """Return the mainloops of a call whose experts have one row tile each.

        Args:
            problem: Layer properties that do not change between calls.
            tokens: Number of tokens of the call.
            experts: Number of experts with rows.
            block: Columns of a tile and depth of a step.
            first: Whether the GEMM is gemm1.

        Returns:
            The loops.
        """
        rows, columns = (
            (problem.width, problem.hidden_size) if first else (problem.hidden_size, problem.intermediate_size)
        )
        # Tiles have 128 columns of each half, but of both together where gate and up rows alternate.
        across = problem.intermediate_size if first and problem.family != "mixed_input" else rows
        weights = experts * rows * columns * problem.bits / 8
        tiles = int(experts * steps_of(across, block))
        return Loops(tiles, steps_of(columns, block), weights, tokens * problem.top_k * rows)

    def split(self, *limits: tuple[int, int], most: int = 16) -> int:
        """Return the number of programs that share a tile's mainloop. Their partial sums fit in the workspace.

        Args:
            limits: (largest number of programs, fewest steps per program); the split must meet one of them.
            most: Largest split allowed.

        Returns:
            A power of two, at most ``most``.
        """
        split, most = 2, min(most, MAX_PARTIALS // max(self.sums, 1))
        while split <= most and any(self.tiles * split <= p and self.steps // split >= least for p, least in limits):
            split *= 2
        return split // 2


@dataclass(frozen=True)
class Speed:
    """Modeled time of a call with few tokens.

    Attributes:
        launches: Time of launches, prologues and sorting, in µs.
        bandwidth: Weights read, in MB per µs (TB/s). It may exceed the memory's, where L2 serves repeated reads.
        vectors: Time to load and quantize a million elements of activations, in µs.
    """

    launches: float
    bandwidth: float
    vectors: float = 0.0

    def time(self, weights: float, elements: float = 0.0) -> float:
        """Return the modeled time.

        Args:
            weights: Bytes of weights that are read.
            elements: Activation elements that programs load.

        Returns:
            The time in µs.
        """
        return self.launches + 1e-6 * (weights / self.bandwidth + elements * self.vectors)
