"""Which launch parameters a fused MoE call gets: a rule from counts and sizes, for any shape.

The quantity that decides is the mean number of rows per expert.  With few, the call streams weights: tiles of 16 rows,
transposed (`swap`), many steps in flight.  With many, it multiplies: tiles of 64 or 128 rows, whose columns are walked
through by several row tiles together, so that weights and activations are found in L2.
The figures behind the thresholds are in docs/performance.md.
"""

from __future__ import annotations

from moe_core.gemm.plan import TileConfig, TilePlan


def tile_plan(
    tokens: int,
    top_k: int,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    block_n: int = 128,
    block_k: int = 128,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``block_n`` is the width of a tile of the up product, which one quantisation group of the down product's input
    must equal; ``block_k`` the depth of one step.  ``capability`` 90 for sm_90, 0 for no NVIDIA GPU.
    """
    if capability < 90 or capability >= 120:
        return _small_shared_plan(tokens * top_k / num_experts, block_n, block_k, capability)
    mean = tokens * top_k / num_experts
    tma = pdl = True
    steps = -(-intermediate_size // block_k)
    if mean <= 16:
        return TilePlan(
            16,
            TileConfig(block_n, 4, 3, swap=True, tma=tma),
            TileConfig(block_n, 4, max(2, min(steps - 1, 5)) if steps > 2 else 2, swap=True, tma=tma),
            pdl,
        )
    if mean <= 40:
        return TilePlan(
            32,
            TileConfig(block_n, 4, 3, swap=True, tma=tma),
            TileConfig(block_n, 4, 2 if steps <= 2 else 3, swap=True, tma=tma),
            pdl,
        )
    if mean <= 300:
        return TilePlan(64, TileConfig(block_n, 8, 4, 8, tma=tma), TileConfig(block_n, 4, 3, 8, tma=tma), pdl)
    # pointers, not descriptors: 128 x 2 x 128 accumulators leave no registers for the descriptors' bookkeeping
    config = TileConfig(block_n, 8, 3, 8)
    return TilePlan(128, config, config, pdl)


def _small_shared_plan(mean: float, block_n: int, block_k: int, capability: int) -> TilePlan:
    """For GPUs with about 100 KB of shared memory per program (sm_89, sm_120) and everything else: two stages."""
    wide = block_n * block_k >= 128 * 128
    pdl = capability >= 90
    if mean <= 24:
        config = TileConfig(block_n, 4, 2)
        return TilePlan(16, config, config, pdl)
    if mean <= 100:
        config = TileConfig(block_n, 8 if wide else 4, 2, 8)
        return TilePlan(32, config, config, pdl)
    config = TileConfig(block_n, 8, 2, 8)
    return TilePlan(64, config, config, pdl)
