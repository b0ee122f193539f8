"""What the launch heuristics of several families share."""

from __future__ import annotations

import math

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: columns of a tile, and depth of a step of the k loop, where scales do not ask for others
BLOCK_N = 128
#: float32 partial sums that a GEMM with split k loops may leave: of 528 programs, 16 rows of two halves of 128 columns
MAX_PARTIALS = 528 * 16 * 2 * 128
#: programs of eight warps that 132 multiprocessors hold at a time, two each
RESIDENT = 264


def steps_of(columns: int, depth: int = 128) -> int:
    """Steps of a k loop over ``columns``, or tiles over that many rows of weights."""
    return -(-columns // depth)


def expected_tiles(problem: LayerProblem, tokens: int, rows: int) -> float:
    """Tiles of so many rows that an expert has, in the mean over uniform routing."""
    if not tokens:
        return 0.0
    share = problem.top_k / problem.num_experts
    mean, spread = tokens * share, math.sqrt(2 * tokens * share * max(1 - share, 1e-3))
    return sum(math.erfc((i * rows + 0.5 - mean) / spread) / 2 for i in range(int(mean / rows) + 4))


#: of programs that share k loops: (most programs in all, fewest steps of each), of which one must hold
Limits = tuple[tuple[int, int], ...]


def split_k(programs: int, steps: int, *limits: tuple[int, int], most: int = 16) -> int:
    """Programs that share a tile's k loop within ``limits``, a power of two up to ``most``."""
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
    """`split_k` of both GEMMs by their limits; tiles are as wide as a step is deep, one for each expert with rows."""
    tiles = min(tokens * problem.top_k, problem.num_experts)
    hidden, inner = steps_of(problem.hidden_size, block), steps_of(problem.intermediate_size, block)
    return split_k(tiles * inner, hidden, gemm1), split_k(tiles * hidden, inner, gemm2)


def swapped(
    rows: int, warps: int, stages: int, *, group: int = 8, split: int = 1, block_n: int = BLOCK_N, tma: bool = True
) -> TileConfig:
    """Tiles of the transposed product (`swap_ab`) with so many rows; ``group`` of them are rasterised together."""
    return TileConfig(rows, block_n, warps, stages, group, True, tma, split)


def float32_plan() -> TilePlan:
    """No tensor cores: a small tile keeps the operands in registers."""
    config = swapped(16, 8, 1, group=1, tma=False)
    return TilePlan(config, config)


def lacks_shared_memory(capability: int) -> bool:
    """Whether a program has about 100 KB of shared memory (sm_89, sm_120), or little is known of the device."""
    return not 90 <= capability < 120


def small_shared_plan(
    problem: LayerProblem, tokens: int, *, warps: tuple[int, int, int] = (4, 8, 8), most: int = 64
) -> TilePlan:
    """The transposed product with two stages; ``warps`` of tiles of 16, 32 and 64 rows, up to ``most``."""
    mean = problem.rows_per_expert(tokens)
    rows = min(16 if mean <= 12 else 32 if mean <= 24 else 64, most)
    config = swapped(rows, warps[rows // 32], 2, group=1 if rows == 16 else 8, tma=False)
    return TilePlan(config, config)
