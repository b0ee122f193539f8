"""Launch parameters of the product with weights that are widened in registers: a rule from counts and sizes.

The mean number of rows per expert decides.  With few, the call streams weights: tiles of 16 or 32 rows, and several
programs share the k loop of a tile where tiles are too few.  With many, the matrix units decide: the more rows a tile
has, the more products a widened weight enters.  Every product is transposed (`swap`).
The figures behind the thresholds are in docs/performance.md.
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan

#: columns of a tile; also what rows of the intermediate are padded to
BLOCK_N = 128
#: the most programs that a split k loop may make; each stores at most MIN_BLOCK_M rows of its tile
MAX_SPLIT_PROGRAMS = 528
MIN_BLOCK_M = 16


def upcast_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    block_k: int = 128,
    stepwise: bool = False,
    wide: bool = False,
    halves: bool = False,
    split: bool = True,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``block_k`` depth of a step, ``stepwise`` each step's product is scaled by itself, ``wide`` activations are float32,
    ``halves`` they are pairs of bfloat16 numbers, ``split`` k loops may be split, ``capability`` 90 for sm_90, 0 for no
    NVIDIA GPU.
    """
    mean = tokens * top_k / num_experts
    if wide:
        # no matrix units: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program; products of these matrix units take more registers
        rows, warps = (16, 8 if halves else 4) if mean <= 12 else (32, 8) if mean <= 24 or stepwise or halves else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == MIN_BLOCK_M else 8, swap=True)
        return TilePlan(config, config, capability >= 90)
    up_steps, down_steps = -(-hidden_size // block_k), -(-intermediate_size // block_k)
    if mean <= 24:
        rows = 16 if mean <= 12 else 32
        tiles = min(tokens * top_k, num_experts)
        # narrow tiles keep two or three programs on a multiprocessor, so that one loads while another multiplies; rows
        # of the intermediate have to end with a whole tile of the wide kind
        up_n = 64 if rows == MIN_BLOCK_M and intermediate_size % BLOCK_N == 0 else BLOCK_N
        up_tiles = tiles * -(-intermediate_size // up_n)
        # one step less in flight, and a fourth program fits: where that spares a second round
        up_stages = 4 if rows == MIN_BLOCK_M and not 132 * 3 < up_tiles <= 132 * 4 else 3
        up_split = down_split = 1
        if split and rows == MIN_BLOCK_M:
            up_split = _split(264, up_tiles, up_steps)
            down_split = _split(264, tiles * -(-hidden_size // BLOCK_N), down_steps)
        return TilePlan(
            TileConfig(rows, up_n, 4, up_stages, 1, True, True, up_split),
            TileConfig(rows, BLOCK_N, 4, 2 if down_steps <= 2 else 3, 1, True, True, down_split),
            # where launches are a good part of the time; else programs that come early only take bandwidth
            up_split > 1,
        )
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    if mean <= 48 or halves:
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
