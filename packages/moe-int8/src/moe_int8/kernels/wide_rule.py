"""Launch parameters of products with weights that are widened in registers: a rule from counts and sizes.

As `moe_core.gemm.rule`, for tiles that are always transposed: a widened weight enters as many products as a tile has
rows.
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan

#: columns of a tile
BLOCK_N = 128


def wide_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    dtype_bytes: int = 2,
    stepwise: bool = False,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``dtype_bytes`` of the activations; ``stepwise``: each step's product is scaled by itself; ``capability`` 90 for
    sm_90, 0 for no NVIDIA GPU.
    """
    mean = tokens * top_k / num_experts
    if dtype_bytes == 4:
        # no matrix units: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program
        rows, warps = (16, 4) if mean <= 12 else (32, 8) if mean <= 24 or stepwise else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == 16 else 8, swap=True)
        return TilePlan(config, config, capability >= 90)
    if mean <= 24:
        rows = 16 if mean <= 12 else 32
        tiles = min(tokens * top_k, num_experts)
        up_split = down_split = 1
        if rows == 16:
            up_split = _split(264, tiles * -(-intermediate_size // BLOCK_N), -(-hidden_size // 128))
            down_split = _split(264, tiles * -(-hidden_size // BLOCK_N), -(-intermediate_size // 128))
        down_stages = 2 if intermediate_size <= 256 else 3
        return TilePlan(
            TileConfig(rows, BLOCK_N, 4, 4 if rows == 16 else 3, 1, True, True, up_split),
            TileConfig(rows, BLOCK_N, 4, down_stages, 1, True, True, down_split),
            # where launches are a good part of the time; else programs that come early only take bandwidth
            up_split > 1,
        )
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    if mean <= 48:
        return TilePlan(few, few)
    many = TileConfig(128, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    # two accumulators of 128 x 128 leave no registers for the product of a step
    return TilePlan(few if stepwise else many, many if mean > 384 else few)


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split
