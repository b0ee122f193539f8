"""Launch parameters of products with packed int4 weights and int8 activations: a rule from counts and sizes.

As `moe_core.gemm.rule`, for tiles that are always transposed: an unpacked weight enters as many products as a tile has
rows.
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan

#: columns of a tile
BLOCK_N = 128


def w4a8_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    stepwise: bool = False,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``stepwise``: each step's product is scaled by itself; ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    mean = tokens * top_k / num_experts
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program
        rows, warps = (16, 4) if mean <= 12 else (32, 8) if mean <= 24 or stepwise else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == 16 else 8, swap_ab=True)
        return TilePlan(config, config, capability >= 90)
    if mean <= 12:
        tiles = min(tokens * top_k, num_experts)
        down_steps = -(-intermediate_size // 128)
        programs = tiles * -(-intermediate_size // BLOCK_N)
        up_split = _split(264, programs, -(-hidden_size // 128))
        down_split = _split(264, tiles * -(-hidden_size // BLOCK_N), down_steps)
        # few registers: four programs of four warps on each of 132 multiprocessors, or two of eight where there are no
        # more
        warps = 8 if programs * up_split <= 264 else 4
        up = TileConfig(16, BLOCK_N, warps, 4, 1, True, True, up_split)
        down = TileConfig(16, BLOCK_N, warps, 2 if down_steps <= 2 else 3, 1, True, True, down_split)
        # where launches are a good part of the time; else programs that come early only take bandwidth
        return TilePlan(up, down, up.split_k > 1 or (tokens * top_k <= 64 and down_steps > 2))
    if mean <= 24:
        config = TileConfig(32, BLOCK_N, 4, 3, 1, True, True)
        return TilePlan(config, config)
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap_ab=True, tma=True)
    if mean <= 48 or capability != 90:
        # beyond sm_90 Triton multiplies int8 as sm_80 does, with both operands in registers
        return TilePlan(few, few)
    many = TileConfig(128, BLOCK_N, 8, 3, 8, swap_ab=True, tma=True)
    # two accumulators of 128 x 128 leave no registers for the product of a step
    return TilePlan(few if stepwise else many, many if mean > 384 else few)


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split
