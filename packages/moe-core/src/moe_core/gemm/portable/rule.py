"""Launch parameters of the portable backend: a rule from counts and sizes, for any shape.

The mean number of rows per expert decides.  With few, a call streams weights: tiles of 16 or 32 rows, and several
programs share the k loop of a tile where tiles are too few.  With many, a number that was made of a code should enter
as many products as registers allow.  Every product is transposed (`swap`).
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan

#: columns of a tile
BLOCK_N = 128


def portable_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype_bytes: int = 2,
    group_size: int = 128,
    permuted: bool = False,
    scaled_numbers: bool = False,
    scaled_steps: bool = False,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``dtype_bytes`` of the activations; ``group_size`` columns share a scale (-1: all), each group's sum is scaled by
    itself; ``permuted``: each column has scales of its own; ``scaled_numbers``: scales enter the products, not their
    sums; ``scaled_steps``: the activations of each step have scales; ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    stepwise = group_size != -1 or scaled_steps
    mean = tokens * top_k / num_experts
    if dtype_bytes == 4:
        # no tensor cores: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap_ab=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120 or permuted:
        # about 100 KB of shared memory per program; scales of columns are gathered, which no pipeline hides
        # where no NVIDIA GPU is meant, products of a step spill beside sums of 32 rows
        narrow = stepwise or scaled_numbers
        rows = 16 if mean <= 12 or (narrow and not capability) else 32 if mean <= 24 or narrow else 64
        config = TileConfig(rows, BLOCK_N, 8, 2, 1 if rows == 16 else 8, swap_ab=True)
        return TilePlan(config, config, capability >= 90)
    if mean <= 12:
        tiles = min(tokens * top_k, num_experts)
        up_steps, down_steps = -(-hidden_size // 128), -(-intermediate_size // 128)
        programs = tiles * -(-intermediate_size // BLOCK_N)
        up_split = _split(264, programs, up_steps)
        down_split = _split(264, tiles * -(-hidden_size // BLOCK_N), down_steps)
        # two programs of eight warps on each of 132 multiprocessors, or four of four where there are more
        warps = 8 if programs * up_split <= 264 else 4
        up = TileConfig(16, BLOCK_N, warps, 4, 1, True, True, up_split)
        down = TileConfig(16, BLOCK_N, warps, 2 if down_steps <= 2 else 3, 1, True, True, down_split)
        # where launches are a good part of the time; else programs that come early only take bandwidth
        return TilePlan(up, down, up.split_k > 1 or (tokens * top_k <= 64 and down_steps > 2))
    if mean <= 24:
        # four products of a step, or scales of its columns, take the registers of four warps
        config = TileConfig(32, BLOCK_N, 8 if group_size == 32 or scaled_steps else 4, 3, 1, True, True)
        return TilePlan(config, config)
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap_ab=True, tma=True)
    if mean <= 48 or stepwise:
        # two accumulators of 128 x 128 leave no registers for the product of a step
        return TilePlan(few, few)
    many = TileConfig(128, BLOCK_N, 8, 3, 8, swap_ab=True, tma=True)
    return TilePlan(many, many if mean > 384 else few)


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split
