"""Launch parameters of products with e4m3 activations: a rule from counts and sizes, for any shape.

Every product is transposed (`swap`): weights go from registers into the tensor cores.  With few rows per expert the k
loop of a tile is shared by programs, where tiles alone are too few for all multiprocessors; with many, the more rows a
tile has, the more products a widened weight enters.  The figures behind the thresholds are in docs/design/scaled_mm.md.
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan

#: rows of weights of a tile, of each half where there are two
BLOCK_N = 128


def e4m3_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    gated: bool = True,
    static: bool = False,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``gated``: the up product has two halves; ``static``: its epilogue quantises h; ``capability`` 90 for sm_90, 0 for
    no NVIDIA GPU.
    """
    pairs = tokens * top_k
    mean = pairs / num_experts
    if capability < 90 or capability >= 120:
        # about 100 KB of shared memory per program
        rows, warps = (16, 4) if mean <= 12 else (32, 4) if mean <= 24 else (64, 8)
        config = TileConfig(rows, BLOCK_N, warps, 2, 1 if rows == 16 else 8, swap_ab=True)
        return TilePlan(config, config, capability >= 90)
    if mean <= 24:
        rows, stages = (16, 4) if mean <= 12 else (32, 3)
        tiles = min(pairs, num_experts)
        # room for parts is that of 528 programs of 16 rows
        target = 400 if rows == 16 else 264
        up_split = _split(target, tiles * -(-intermediate_size // BLOCK_N), -(-hidden_size // 128))
        down_split = _split(target, tiles * -(-hidden_size // BLOCK_N), -(-intermediate_size // 128))
        return TilePlan(
            TileConfig(rows, BLOCK_N, 4, stages, 1, True, True, up_split),
            TileConfig(rows, BLOCK_N, 4, stages, 1, True, True, down_split),
        )
    some = TileConfig(64, BLOCK_N, 4, 3, 8, True, True)
    if mean <= 96:
        return TilePlan(some, some)
    # sums of sm_100 lie in tensor memory, but pass through the registers of four warps in one piece
    many = (
        TileConfig(128, BLOCK_N, 4, 4, 8, True, True)
        if capability < 100
        else TileConfig(128, BLOCK_N, 8, 3, 8, True, True)
    )
    # sums of two halves of 64 columns each take the registers that those of one of 128 take; what an epilogue quantises
    # is padded to whole 128
    narrow = TileConfig(128, BLOCK_N // 2, 4, 4, 8, True, True) if gated else many
    return TilePlan(some if static else narrow, many)


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 5 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 5:
        split *= 2
    return split
