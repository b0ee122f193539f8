"""Helpers that the launch heuristics of several families share."""

from __future__ import annotations

import math

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Columns of a tile and depth of a k-loop step, unless the scales require others.
BLOCK_N = 128
#: Largest number of float32 partial sums of a split-K GEMM: 528 programs, 16 rows, two halves of 128 columns.
MAX_PARTIALS = 528 * 16 * 2 * 128
#: Programs of eight warps that 132 SMs hold at a time, two each.
RESIDENT = 264


def steps_of(columns: int, depth: int = 128) -> int:
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


#: Limits on split-K as (largest number of programs, fewest steps per program); meeting one of them suffices.
Limits = tuple[tuple[int, int], ...]


def split_k(programs: int, steps: int, *limits: tuple[int, int], most: int = 16) -> int:
    """Return the number of programs that share a tile's k loop.

    Args:
        programs: Number of programs without split-K.
        steps: Steps of the k loop.
        limits: Pairs as in `Limits`; the split must meet one of them.
        most: Largest split allowed.

    Returns:
        A power of two, at most ``most``.
    """
    split = 1
    while split * 2 <= most:
        twice = split * 2
        if not any(programs * twice <= limit and steps // twice >= least for limit, least in limits):
            break
        split = twice
    return split


def splits(
    problem: LayerProblem, tokens: int, gemm1: tuple[int, int], gemm2: tuple[int, int], block: int = BLOCK_N
) -> tuple[int, int]:
    """Return `split_k` of both GEMMs, assuming one tile per expert with rows.

    Tiles are as wide as a k-loop step is deep.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.
        gemm1: Limit of the first GEMM, as in `Limits`.
        gemm2: Limit of the second GEMM.
        block: Columns of a tile, and depth of a step.

    Returns:
        The splits of gemm1 and gemm2.
    """
    tiles = min(tokens * problem.top_k, problem.num_experts)
    hidden, inner = steps_of(problem.hidden_size, block), steps_of(problem.intermediate_size, block)
    return split_k(tiles * inner, hidden, gemm1), split_k(tiles * hidden, inner, gemm2)


def swapped(
    rows: int, warps: int, stages: int, *, group: int = 8, split: int = 1, block_n: int = BLOCK_N, tma: bool = True
) -> TileConfig:
    """Return a configuration of the transposed product (`swap_ab`).

    Args:
        rows: Rows of a tile.
        warps: Warps per program.
        stages: Pipeline stages.
        group: Row tiles that are rasterized together.
        split: Number of programs that share a k loop.
        block_n: Columns of a tile.
        tma: Whether to read weights through TMA descriptors.

    Returns:
        The launch configuration.
    """
    return TileConfig(rows, block_n, warps, stages, group, True, tma, split)


def float32_plan() -> TilePlan:
    """Return the plan for float32 operands.

    They have no tensor cores: a small tile keeps the operands in registers.
    """
    config = swapped(16, 8, 1, group=1, tma=False)
    return TilePlan(config, config)


def lacks_shared_memory(capability: int) -> bool:
    """Whether a program has only about 100 KB of shared memory, or the device is unknown.

    Args:
        capability: Compute capability (sm_89 and sm_120 have little shared memory); 0 without an NVIDIA GPU.

    Returns:
        True unless the device is sm_90 to sm_119.
    """
    return not 90 <= capability < 120


def small_shared_plan(
    problem: LayerProblem, tokens: int, *, warps: tuple[int, int, int] = (4, 8, 8), most: int = 64
) -> TilePlan:
    """Return the transposed product with two stages, for little shared memory.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.
        warps: Warps for tiles of 16, 32 and 64 rows.
        most: Largest tile height.

    Returns:
        The same configuration for both GEMMs.
    """
    mean = problem.rows_per_expert(tokens)
    rows = min(16 if mean <= 12 else 32 if mean <= 24 else 64, most)
    config = swapped(rows, warps[rows // 32], 2, group=1 if rows == 16 else 8, tma=False)
    return TilePlan(config, config)
