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
    gated: bool = True,
    packed: bool = False,
    stepwise: bool = False,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``dtype_bytes`` of the activations; ``gated``: the up product has two halves; ``packed``: weights are pairs in
    bytes; ``stepwise``: each step's product is scaled by itself; ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    mean = tokens * top_k / num_experts
    if dtype_bytes == 4:
        # no tensor cores: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program
        rows, warps = (16, 4) if mean <= 12 else (32, 8) if mean <= 24 or stepwise else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == 16 else 8, swap=True)
        return TilePlan(config, config, capability >= 90)
    if mean <= 12:
        tiles = min(tokens * top_k, num_experts)
        up_steps, down_steps = -(-hidden_size // 128), -(-intermediate_size // 128)
        if packed:
            programs = tiles * -(-intermediate_size // BLOCK_N)
            up_split = _split(264, programs, up_steps)
            down_split = _split(264, tiles * -(-hidden_size // BLOCK_N), down_steps)
            # half the bytes of a step, and few registers: four programs of four warps on each of 132 multiprocessors,
            # or two of eight where there are no more
            warps = 8 if programs * up_split <= 264 else 4
            up = TileConfig(16, BLOCK_N, warps, 4, 1, True, True, up_split)
            down = TileConfig(16, BLOCK_N, warps, 2 if down_steps <= 2 else 3, 1, True, True, down_split)
        else:
            up = _up(tiles, intermediate_size, up_steps, gated=gated)
            down = _down(tiles, hidden_size, down_steps)
        # where launches are a good part of the time; else programs that come early only take bandwidth
        return TilePlan(up, down, up.split > 1 or (tokens * top_k <= 64 and down_steps > 2))
    if mean <= 24:
        config = TileConfig(32, BLOCK_N, 4, 3, 1, True, True)
        return TilePlan(config, config)
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    if mean <= 48 or (packed and capability != 90):
        # beyond sm_90 Triton multiplies int8 as sm_80 does, with both operands in registers
        return TilePlan(few, few)
    many = TileConfig(128, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    # two accumulators of 128 x 128 leave no registers for the product of a step
    return TilePlan(few if stepwise else many, many if mean > 384 else few)


def _up(tiles: int, columns: int, steps: int, *, gated: bool) -> TileConfig:
    """The up product of a few rows in each of ``tiles`` experts."""
    wide = tiles * -(-columns // BLOCK_N)
    if not gated:
        # half the bytes of a step
        return TileConfig(16, BLOCK_N, 8, 4, 1, True, True, _split(396, wide, steps))
    # Two programs of eight warps on each of 132 multiprocessors: all in one round, or few enough to be split.
    # Narrow tiles must not leave rows of the intermediate without a whole tile of the wide kind.
    if columns % BLOCK_N or wide <= 66 or 132 <= wide <= 264:
        return TileConfig(16, BLOCK_N, 8, 3, 1, True, True, _split(264, wide, steps))
    return TileConfig(16, BLOCK_N // 2, 4, 4, 1, True, True)


def _down(tiles: int, columns: int, steps: int) -> TileConfig:
    """The down product of a few rows in each of ``tiles`` experts."""
    programs = tiles * -(-columns // BLOCK_N)
    if programs > 528 and steps <= 8:
        # short programs, of which the next load while others multiply
        return TileConfig(16, BLOCK_N, 4, 3, 1, True, True)
    return TileConfig(16, BLOCK_N, 8, 4 if steps > 2 else 3, 1, True, True, _split(264, programs, steps))


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split
