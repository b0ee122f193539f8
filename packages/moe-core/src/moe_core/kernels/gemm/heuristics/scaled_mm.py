"""Launch configurations of scaled_mm: 8-bit activations, weights that are or become 8-bit.

With few rows per expert, tiles are transposed (`swap_ab`) and have many steps in flight. With many rows, row tiles
advance through the columns together, so that weights and activations are found in L2.
"""

from __future__ import annotations

from dataclasses import replace

from moe_core.kernels.gemm.heuristics.decoded import decoded_plan
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.tiles import (
    BLOCK_N,
    RESIDENT,
    expected_tiles,
    lacks_shared_memory,
    small_shared_plan,
    splits,
    steps_of,
    swapped,
)
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Rows per expert, and rows times the intermediate size, up to which gemm1 has tiles of 64 rows.
FEW_ROWS = 128
FEW_ELEMENTS = 32768
#: `LayerProblem.balance` above which memory is as slow relative to the tensor cores as an H100's.
SLOW = 150
#: Bytes of an expert's gemm1 weights that stay in L2.
IN_L2 = 32 << 20


def quantizes_while_loading(capability: int) -> bool:
    """Whether a conversion may stand between load and product.

    Triton 3.6 cannot pipeline such a loop for sm_100.

    Args:
        capability: Compute capability; 0 without an NVIDIA GPU.

    Returns:
        False for sm_100 to sm_119.
    """
    return not 100 <= capability < 120


def scaled_mm_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the plan for 8-bit activations.

    A tile is as wide as a step is deep: one group of the scales of the weights, and one of the scales of h.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations of both GEMMs.
    """
    if problem.element == "int4":
        return decoded_plan(problem, tokens)
    if problem.element == "e2m1":
        return _e2m1_plan(problem, tokens)
    block, capability = BLOCK_N if problem.group_size == -1 else problem.group_size, problem.capability
    mean = problem.rows_per_expert(tokens)
    if lacks_shared_memory(capability):
        return _small_shared_plan(mean, block, capability)
    gemm1_steps, gemm2_steps = steps_of(problem.hidden_size, block), steps_of(problem.intermediate_size, block)
    if mean <= 24:
        # Both heights stream weights. What the second tile of an expert reads again decides.
        rows = 16 if expected_tiles(problem, tokens, 16) <= 1.05 else 32
        # Few programs leave SMs idle. A tile of one half leaves space for other programs on the SM.
        limit = (132 if problem.gated else 396, 4)
        gemm1_split, gemm2_split = splits(problem, tokens, limit, (RESIDENT, 4), block)
        if rows == 32:
            # Either two programs per SM, or one with more steps in flight. The latter is faster for long k
            # loops.
            long = 4 if problem.group_size == -1 else 5
            gemm1_stages = long if gemm1_steps >= 32 and gemm1_split == 1 else 3
            gemm2_stages = long if gemm2_steps >= 32 and gemm2_split == 1 else min(3, max(2, gemm2_steps))
        else:
            # float32 rows that are quantized on load leave space for five stages.
            deep = 5 if problem.dtype_bytes == 4 else 6
            gemm1_stages = 4 if gemm1_split > 1 else (deep if gemm1_steps >= 32 else 3)
            gemm2_stages = 2 if gemm2_steps <= 2 else (3 if gemm2_steps < 16 else 5)
        return TilePlan(
            swapped(rows, 4, gemm1_stages, group=1, split=gemm1_split, block_n=block),
            swapped(rows, 4, gemm2_stages, group=1, split=gemm2_split, block_n=block),
        )
    few = TileConfig(64, block, 8, 4, 1 if mean <= 64 else 8, tma=True)
    if capability != 90:
        return TilePlan(few, TileConfig(64, block, 4, 3, 8, tma=True) if mean > 64 else few)
    # Pointers, not descriptors: 128 x 2 x 128 accumulators leave no registers for the descriptors' bookkeeping.
    many = TileConfig(128, block, 8, 3, _group_m(problem), warp_specialized=True)
    gemm1_short, gemm2_short = _short_tiles(problem, mean)
    if mean <= max(48, min(FEW_ROWS, FEW_ELEMENTS / problem.intermediate_size)):
        # Most of 128 rows would be empty. gemm1 suffers from that, more so the fewer columns it has; gemm2 does
        # not.
        return TilePlan(replace(few, group_m=8), replace(many, short_tiles=gemm2_short))
    return TilePlan(replace(many, short_tiles=gemm1_short), replace(many, short_tiles=gemm2_short))


def _group_m(problem: LayerProblem) -> int:
    """Return the row tiles that advance together in the warp-specialized kernel.

    The result is 1 where L2 still holds the expert's weights for its second tile.
    """
    weights = problem.hidden_size * problem.intermediate_size * (2 if problem.gated else 1)
    return 1 if weights <= IN_L2 else 8


def _short_tiles(problem: LayerProblem, mean: float) -> tuple[bool, bool]:
    """Whether the warp-specialized kernel computes 64 rows of short tiles, per GEMM.

    Two column blocks at a time request weights at another rate than a whole tile running alongside. Over long k loops
    one gets ahead of the other, and L2 no longer holds what both read. Where products are summed over all of k,
    consumers free a slot one step later, and starve with half of the slots. Where memory is the limit, fewer products
    gain nothing.
    """
    if problem.group_size == -1:
        return False, False
    hidden, inner = problem.hidden_size, problem.intermediate_size
    by_memory = mean < 1.05 * problem.balance
    # With two column blocks (256 columns) all work consists of such pairs. Measured from 768 columns on.
    gemm1 = (hidden <= 4096 and inner >= 512) or (hidden <= 8192 and inner >= 1024 and mean >= 144)
    # With many rows, short tiles are rare, and programs with short loops inspect each tile before they take it. In
    # short loops the rows of h come from L2. An H200 gains from 48 rows per expert on.
    gemm2 = inner <= 4096 and mean <= 224 and not (by_memory and inner > 512 and problem.balance > SLOW)
    return gemm1 and not by_memory, gemm2


def _small_shared_plan(mean: float, block: int, capability: int) -> TilePlan:
    """Return the untransposed product with two stages."""
    if mean <= 24:
        config = TileConfig(16, block, 4, 2)
    elif not capability:
        # AMD: more rows or more warps spill where gfx942 widens e4m3.
        config = TileConfig(16, block, 4, 2, 8)
    elif mean <= 100:
        config = TileConfig(32, block, 8 if block >= 128 else 4, 2, 8)
    else:
        config = TileConfig(64, block, 8, 2, 8)
    return TilePlan(config, config)


def _e2m1_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the plan for e2m1 weights, which become e4m3 in registers.

    Every product is transposed.
    """
    mean, capability = problem.rows_per_expert(tokens), problem.capability
    if lacks_shared_memory(capability):
        return small_shared_plan(problem, tokens, warps=(4, 4, 8))
    if mean <= 24:
        rows, stages = (16, 4) if mean <= 12 else (32, 3)
        # The workspace for partial sums holds 528 programs of 16 rows.
        limit = (400 if rows == 16 else RESIDENT, 5)
        gemm1_split, gemm2_split = splits(problem, tokens, limit, limit)
        return TilePlan(
            swapped(rows, 4, stages, group=1, split=gemm1_split), swapped(rows, 4, stages, group=1, split=gemm2_split)
        )
    # Sums of sm_100 are in tensor memory but pass through the registers of four warps in one piece. LoRA deltas do
    # not fit in registers next to the sums of two halves.
    warps = 8 if capability >= 100 and problem.gated and problem.lora else 4
    some = swapped(64, warps, 3)
    if mean <= 96:
        return TilePlan(some, swapped(64, 4, 3))
    many = swapped(128, 4, 4) if capability < 100 else swapped(128, 8, 3)
    # Sums of two halves of 64 columns take as many registers as sums of one half of 128 columns. Values that an
    # epilogue quantizes are padded to whole 128 columns.
    narrow = swapped(128, warps, 4, block_n=BLOCK_N // 2) if problem.gated else many
    return TilePlan(some if problem.quantizes_h else narrow, many)
