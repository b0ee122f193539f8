"""Launch parameters of the product with weights that are widened in registers: a rule from counts and sizes.

The mean number of rows per expert decides.  With few, the call streams weights: tiles of 16 or 32 rows, and several
programs share the k loop of a tile where tiles are too few.  With many, the tensor cores decide: the more rows a tile
has, the more products a widened weight enters.  Every product is transposed (`swap`).
The figures behind the thresholds are in docs/design/mixed_input.md.
"""

from __future__ import annotations

from dataclasses import replace

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
    gated: bool = True,
    split: bool = True,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``block_k`` depth of a step, ``stepwise`` each step's product is scaled by itself, ``wide`` activations are float32,
    ``halves`` they are pairs of bfloat16 numbers, ``gated`` the up product has two halves, ``split`` k loops may be
    split, ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    mean = tokens * top_k / num_experts
    if wide:
        # no tensor cores: a small tile keeps the operands in registers
        config = TileConfig(16, BLOCK_N, 8, 1, 1, swap=True)
        return TilePlan(config, config)
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program; products of these tensor cores take more registers
        rows, warps = (
            (16, 8 if halves else 4) if mean <= 12 else (32, 8) if mean <= 24 or stepwise or halves else (64, 8)
        )
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == MIN_BLOCK_M else 8, swap=True)
        return TilePlan(config, config, capability >= 90)
    # pieces of tiles go through the tensor memory accelerator, which needs no masks
    up_tma = hidden_size % block_k != 0 or intermediate_size % BLOCK_N != 0
    down_tma = intermediate_size % block_k != 0 or hidden_size % BLOCK_N != 0
    if mean <= 12:
        tiles = min(tokens * top_k, num_experts)
        up_steps, down_steps = -(-hidden_size // block_k), -(-intermediate_size // block_k)
        up = _up(tiles, intermediate_size, up_steps, gated=gated, split=split, tma=up_tma)
        down = _down(tiles, hidden_size, down_steps, split=split, tma=down_tma)
        # where launches are a good part of the time; else programs that come early only take bandwidth
        pdl = tokens * top_k <= 64 and tiles * -(-hidden_size // BLOCK_N) <= 1056
        return TilePlan(up, down, pdl)
    if mean <= 24:
        config = TileConfig(32, BLOCK_N, 4, 3, 1, True, True)
        return TilePlan(config, config)
    few = TileConfig(64, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    if mean <= 48 or halves:
        return TilePlan(few, few)
    many = TileConfig(128, BLOCK_N, 8, 3, 8, swap=True, tma=True)
    # two accumulators of 128 x 128 leave no registers for the product of a step
    return TilePlan(few if stepwise else replace(many, tma=up_tma), many if mean > 384 else few)


def _up(tiles: int, columns: int, steps: int, *, gated: bool, split: bool, tma: bool) -> TileConfig:
    """The up product of a few rows in each of ``tiles`` experts."""
    wide = tiles * -(-columns // BLOCK_N)
    if not gated:
        # half the bytes of a step
        return TileConfig(MIN_BLOCK_M, BLOCK_N, 8, 4, 1, True, tma, _split(396, wide, steps) if split else 1)
    # two programs of eight warps on each of 132 multiprocessors, where that makes one round; narrow tiles may not leave
    # rows of the intermediate without a whole tile of 128
    if columns % BLOCK_N or wide <= 264:
        return TileConfig(MIN_BLOCK_M, BLOCK_N, 8, 3, 1, True, True, _split(264, wide, steps) if split else 1)
    return TileConfig(MIN_BLOCK_M, BLOCK_N // 2, 4, 4, 1, True, tma)


def _down(tiles: int, columns: int, steps: int, *, split: bool, tma: bool) -> TileConfig:
    """The down product of a few rows in each of ``tiles`` experts."""
    programs = tiles * -(-columns // BLOCK_N)
    if programs > 528 and steps <= 8:
        # short programs, of which the next load while others multiply
        return TileConfig(MIN_BLOCK_M, BLOCK_N, 4, 3, 1, True, True)
    parts = _split(264, programs, steps) if split else 1
    return TileConfig(MIN_BLOCK_M, BLOCK_N, 8, 4 if steps > 2 else 3, 1, True, tma, parts)


def is_apart(config: TileConfig) -> bool:
    """Whether a step is two products, which takes fewer registers than one: two programs then fit a multiprocessor."""
    return config.block_m == MIN_BLOCK_M and config.num_warps == 8


def is_stepwise(config: TileConfig) -> bool:
    """Whether MXFP8 products of a step are added by themselves: with `wgmma` (no other GPU's plans have ``tma``)."""
    return config.tma and config.block_m <= 64


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split
