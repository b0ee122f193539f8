"""Which launch parameters a fused MoE call gets: a rule from counts and sizes, for any shape.

The quantity that decides is the mean number of rows per expert.  With few, the call streams weights: tiles of 16 rows,
transposed (`swap`), many steps in flight.  With many, it multiplies: tiles of 64 or 128 rows, whose columns are walked
through by several row tiles together, so that weights and activations are found in L2.
The figures behind the thresholds are in docs/design/scaled_mm.md.
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
    gated: bool = True,
    block_n: int = 128,
    block_k: int = 128,
    capability: int = 90,
) -> TilePlan:
    """The plan for ``tokens`` x ``top_k`` pairs over ``num_experts`` (all of the layer, local or not).

    ``block_n`` is the width of a tile of the up product, which one quantisation group of the down product's input
    must equal; ``block_k`` the depth of one step.  ``gated``: the up product has two halves.  ``capability`` 90 for
    sm_90, 0 for no NVIDIA GPU.
    """
    if capability < 90 or capability >= 120:
        return _small_shared_plan(tokens * top_k / num_experts, block_n, block_k, capability)
    mean = tokens * top_k / num_experts
    up_steps, down_steps = -(-hidden_size // block_k), -(-intermediate_size // block_k)
    if mean <= 24:
        rows = 16 if mean <= 12 else 32
        tiles = min(tokens * top_k, num_experts)
        # few programs leave multiprocessors without work: share the k loop of a tile among several
        # (a tile of one half leaves room for others beside it)
        up_split = _split(132 if gated else 396, tiles * -(-intermediate_size // block_n), up_steps)
        down_split = _split(264, tiles * -(-hidden_size // block_n), down_steps)
        up_stages = 4 if up_split > 1 or rows == 32 else (6 if up_steps >= 32 else 3)
        down_stages = 2 if down_steps <= 2 else (3 if down_steps < 16 else 5)
        return TilePlan(
            TileConfig(rows, block_n, 4, min(up_stages, 3) if rows == 32 else up_stages, 1, True, True, up_split),
            TileConfig(rows, block_n, 4, min(down_stages, 3) if rows == 32 else down_stages, 1, True, True, down_split),
            # where launches are a good part of the time; else programs that come early only take bandwidth
            up_split > 1,
        )
    if mean <= 48 or capability != 90:
        few = TileConfig(64, block_n, 8, 4, 1 if mean <= 64 else 8, tma=True)
        return TilePlan(few, TileConfig(64, block_n, 4, 3, 8, tma=True) if mean > 64 else few, False)
    # Pointers, not descriptors: 128 x 2 x 128 accumulators leave no registers for the descriptors' bookkeeping.
    # No dependent launch: persistent programs that come early take room from the kernel before them.
    many = TileConfig(128, block_n, 8, 3, 8, warp_specialised=True)
    return TilePlan(many, many, False)


def quantizes_while_loading(capability: int) -> bool:
    """Whether a conversion may stand between load and product: Triton 3.6 cannot pipeline that for sm_100."""
    return not 100 <= capability < 120


def _split(target: int, programs: int, steps: int) -> int:
    """Programs that share a tile's loop, a power of two: up to ``target`` programs in all, 4 steps each at least."""
    split = 1
    while split < 16 and programs * split * 2 <= target and steps // (split * 2) >= 4:
        split *= 2
    return split


def _small_shared_plan(mean: float, block_n: int, block_k: int, capability: int) -> TilePlan:
    """For GPUs with about 100 KB of shared memory per program (sm_89, sm_120) and everything else: two stages."""
    wide = block_n * block_k >= 128 * 128
    pdl = capability >= 90
    if mean <= 24:
        config = TileConfig(16, block_n, 4, 2)
        return TilePlan(config, config, pdl)
    if not capability:
        # AMD: more rows, or more warps, spill where gfx942 widens e4m3
        config = TileConfig(16, block_n, 4, 2, 8)
        return TilePlan(config, config, pdl)
    if mean <= 100:
        config = TileConfig(32, block_n, 8 if wide else 4, 2, 8)
        return TilePlan(config, config, pdl)
    config = TileConfig(64, block_n, 8, 2, 8)
    return TilePlan(config, config, pdl)
