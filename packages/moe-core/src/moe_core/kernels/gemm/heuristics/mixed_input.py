"""Launch configurations of mixed_input: 16-bit activations, weights repacked at load time.

Every product is transposed (`swap_ab`).

- Tiles of 4-bit words have 128 weight rows and four warps, because the 16-bit values of more rows do not fit in
  registers.
- With up to five rows per expert, sm_90 uses tiles of 8 rows for 4-bit words, multiplied by `mma.sync`. They need few
  registers, so that twice as many programs keep loads in flight.
- Tiles of 16 and 32 rows get a register limit on sm_90 where one more program per SM saves a wave.
- With more than 14 rows per expert (e2m1: 28), sm_90 has a dedicated kernel for 4-bit words, which dequantizes while
  the tensor cores multiply (`moe_core.kernels.gemm.sm90.mixed_input`).
- 8-bit words take twice the shared memory. Tiles of 128 activation rows would leave one program of four warps per SM.
  They get 256 weight rows and eight warps, or two stages.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.tiles import (
    BLOCK_N,
    MAX_PARTIALS,
    RESIDENT,
    Limits,
    expected_tiles,
    float32_plan,
    lacks_shared_memory,
    small_shared_plan,
    split_k,
    steps_of,
    swapped,
)
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Programs of four warps that 132 SMs hold at a time.
RESIDENT_4 = 2 * RESIDENT
#: Register limit per thread by rows of a four-warp tile, with which an SM of sm_90 holds `PROGRAMS` programs of a GEMM.
#: That is one more than with the compiler's own choice. Nothing spills, except 8 bytes for float16 with zero points.
MAX_REGISTERS = {16: 128, 32: 168}
PROGRAMS = {16: 4, 32: 3}
MULTIPROCESSORS = 132
#: Programs with tiles of 8 rows that run at a time, and k-loop steps from which splitting into two full waves pays.
RESIDENT_8 = 5 * MULTIPROCESSORS
LONG_LOOP = 20
#: Steps of gemm2's k loop up to which int4 needs only two warps for a tile of 8 rows.
SHORT_LOOP = 2
#: Mean number of 8-row tiles per expert up to which they beat tiles of 16 rows.
MOST_TILES_OF_8 = 1.15


def mixed_input_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the plan for 16-bit activations with integer, e4m3 or e2m1 weights.

    Dequantizing e2m1 takes more instructions, so that taller tiles pay sooner.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations of both GEMMs.
    """
    plan = _tiles(problem, tokens)
    if problem.capability != 90 or problem.dtype_bytes != 2 or problem.batch_invariant:
        return plan
    gemm1, gemm2 = plan.gemm1, plan.gemm2
    columns = problem.intermediate_size * (2 if problem.gated else 1)
    tiles = expected_tiles(problem, tokens, gemm1.block_m) * problem.num_experts * steps_of(columns)
    # With 16 rows, few types need more registers: groups of 128 with zero points, or with paired scales.
    if gemm1.block_m == 32 or _saves_a_round(gemm1.block_m, tiles * gemm1.split_k):
        gemm1 = with_registers(problem, gemm1)
    tiles = expected_tiles(problem, tokens, gemm2.block_m) * problem.num_experts * steps_of(problem.hidden_size)
    if _saves_a_round(gemm2.block_m, tiles * gemm2.split_k):
        gemm2 = with_registers(problem, gemm2)
    return replace(plan, gemm1=gemm1, gemm2=gemm2)


def with_registers(problem: LayerProblem, config: TileConfig) -> TileConfig:
    """Return ``config`` with the register limit of `MAX_REGISTERS` where that applies.

    Args:
        problem: Layer properties that do not change between calls.
        config: Configuration of the tile kernel.

    Returns:
        The configuration; ``max_registers`` is 0 where no limit applies.
    """
    four_warps = (config.block_n, config.num_warps, config.warp_specialized) == (BLOCK_N, 4, False)
    # With 16 rows, e2m1 takes few registers anyway. 8-bit words were slower, or not measured.
    known = config.block_m == 32 or (config.block_m == 16 and problem.element == "int4")
    limited = problem.family == "mixed_input" and four_warps and known
    return replace(config, max_registers=MAX_REGISTERS[config.block_m] if limited else 0)


def _saves_a_round(rows: int, programs: float) -> bool:
    """Whether one more program per SM saves a wave, although each program is slower then."""
    if rows not in PROGRAMS:
        return False
    most = PROGRAMS[rows] * MULTIPROCESSORS
    fewer = most - MULTIPROCESSORS
    # Tail-wave occupancy is a mean and varies between calls: within 5 %, some calls have no tail wave.
    return programs > 3 * fewer or math.ceil(programs / most) < math.ceil(0.95 * programs / fewer)


def _tiles(problem: LayerProblem, tokens: int) -> TilePlan:
    mean = problem.rows_per_expert(tokens)
    if problem.dtype_bytes == 4:
        return float32_plan()
    if lacks_shared_memory(problem.capability):
        return small_shared_plan(problem, tokens)
    hopper, four_bits, gemm2_steps = problem.capability == 90, problem.bits == 4, steps_of(problem.intermediate_size)
    # For 4-bit words a tile of 32 rows takes longer than one of 16 rows, and a second tile of 16 rows finds L2
    # warm.
    if mean <= 12 or (four_bits and expected_tiles(problem, tokens, 16) <= (1.3 if hopper else 1.5)):
        return _few_rows(problem, tokens)
    e2m1 = problem.element == "e2m1"
    few, some, many = swapped(32, 4, 3), swapped(64, 4, 3, tma=False), swapped(128, 4, 3, tma=False)
    # A second tile of few steps costs more than the warp-specialized kernel saves.
    most = 1.2 if hopper and gemm2_steps > 4 else 1.1
    special = hopper and four_bits and not (problem.permuted or problem.lora or problem.batch_invariant)
    thirty_two = mean <= 24
    if four_bits:
        thirty_two = expected_tiles(problem, tokens, 32) <= most and (e2m1 or not special)
    if thirty_two:
        deep = replace(few, num_stages=4) if e2m1 or (hopper and four_bits) else few
        return TilePlan(deep, deep if e2m1 or gemm2_steps > 4 else few)
    if problem.bits == 8:
        wide = swapped(64, 8, 3, block_n=2 * BLOCK_N)
        gemm2 = wide if mean <= 96 and gemm2_steps > 8 else some
        if mean <= 384:
            return TilePlan(few if mean <= 48 else some, gemm2)
        # Rows of h have space for whole tiles of 128 columns, which 256 rows of an ungated product may exceed.
        if problem.gated or gemm2_steps % 2 == 0:
            return TilePlan(swapped(128, 8, 3, block_n=2 * BLOCK_N), gemm2)
        return TilePlan(swapped(128, 4, 2), gemm2)
    if special:
        # The warp-specialized kernel uses the schedule's tile height. The other fields apply where it cannot
        # run.
        some, many = (replace(config, warp_specialized=True, group_m=1) for config in (some, many))
        one = some if expected_tiles(problem, tokens, 64) <= 1.2 else many
        return TilePlan(one, one)
    if mean <= 48:
        return TilePlan(some if e2m1 else few, swapped(64, 4, 3, group=1))
    if mean <= 96:
        return TilePlan(some, some)
    return TilePlan(many, many if mean > 384 else some)


def takes_8_rows(problem: LayerProblem) -> bool:
    """Whether tiles of 8 rows are allowed.

    They use another instruction than taller tiles, whose sums differ.

    Args:
        problem: Layer properties that do not change between calls.

    Returns:
        True for 4-bit weights with 16-bit operands on sm_90, unless results must be batch invariant.
    """
    return problem.capability == 90 and problem.bits == 4 and problem.dtype_bytes == 2 and not problem.batch_invariant


def _few_rows(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return tiles of 8 or 16 rows, whose k loops may be split.

    An SM holds six programs with tiles of 8 rows. Those are bound by memory reads alone.
    """
    eight_rows = takes_8_rows(problem) and expected_tiles(problem, tokens, 8) <= MOST_TILES_OF_8
    # A group of 8 suits calls where many experts have two tiles.
    rows, group = (8 if eight_rows else 16), (1 if problem.rows_per_expert(tokens) <= 12 else 8)
    if not (eight_rows or problem.may_split):
        return TilePlan(swapped(16, 4, 4, group=group), swapped(16, 4, 3, group=group))
    pairs, bits = tokens * problem.top_k, problem.bits
    width = problem.intermediate_size * (2 if problem.gated else 1)
    gemm1_steps, gemm2_steps = steps_of(problem.hidden_size), steps_of(problem.intermediate_size)
    gemm1_limits: Limits
    gemm2_limits: Limits
    if eight_rows:
        # Up to three waves of long splits: a second wave that is nearly empty costs more than summing the
        # partials.
        shorter = ((1800, 8), (720, 5)) if problem.element == "int4" else ()
        # gemm2: most of one wave.
        gemm1_limits, gemm2_limits = ((2300, 16), *shorter, (512, 4)), ((int(1.03 * RESIDENT_8), 5),)
        experts, most_tiles = problem.reached(tokens), math.inf
    else:
        # Splits of at least eight steps, up to three waves; shorter ones only where SMs would be idle.
        gemm1_limits = (1800, 8), (720, 5), (512, 4)
        gemm2_limits = ((1056, 28), (400, 5), (264, 3)) if bits == 4 else ((264, 4),)
        experts, most_tiles = min(pairs, problem.num_experts), RESIDENT_4
    gemm1_tiles, gemm2_tiles = int(experts * steps_of(width)), int(experts * gemm1_steps)

    def split(tiles: int, steps: int, columns: int, limits: Limits, most: int = 16) -> int:
        # The results of all splits must fit in the workspace.
        most = min(most, MAX_PARTIALS // max(pairs * columns, 1))
        return split_k(tiles, steps, *limits, most=most) if tiles < most_tiles else 1

    gemm1_split = split(gemm1_tiles, gemm1_steps, width, gemm1_limits)
    if eight_rows and problem.element == "int4":
        # Up to six waves of splits. Their partial sums are written and read (8 bytes each), at most 1/30 of the
        # weight bytes.
        few = int(experts * problem.hidden_size * bits / (30 * 64 * max(pairs, 1)))
        gemm1_split = max(gemm1_split, split(gemm1_tiles, gemm1_steps, width, ((4800, 8),), min(few, 16)))
    gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, gemm2_limits)
    if eight_rows and 0.95 * RESIDENT_8 < gemm2_tiles < 1.8 * RESIDENT_8 and gemm2_steps > LONG_LOOP:
        # Two full waves instead of one wave and a small or half-empty tail.
        gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, ((4 * RESIDENT_8, 5),), 2)
    elif eight_rows and 1 < gemm2_tiles * gemm2_split / RESIDENT_8 < 1.1 and gemm2_split > 1:
        # Four waves of shorter splits instead.
        gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, ((5 * RESIDENT_8, 5),), 4 * gemm2_split)
    gemm1 = swapped(rows, 4, 4 if gemm1_steps > 16 and not eight_rows else 3, group=group, split=gemm1_split)
    gemm2 = swapped(rows, 4, 3, group=group, split=gemm2_split)
    if eight_rows and gemm1_steps > LONG_LOOP and _fits_16_rows(gemm1_tiles, gemm1_split):
        gemm1 = swapped(16, 4, 3, group=group)
    if eight_rows and problem.element == "int4" and gemm2_steps <= SHORT_LOOP:
        gemm2 = replace(gemm2, num_warps=2)
    if bits == 8:
        # At most two programs per SM: eight warps are faster.
        depth = gemm2_steps // gemm2_split
        eight = gemm2_tiles * gemm2_split <= RESIDENT and depth <= 32
        gemm2 = replace(gemm2, num_warps=8 if eight else 4, num_stages=4 if depth > 16 else 3)
        if gemm1_tiles * gemm1_split <= RESIDENT:
            gemm1 = replace(gemm1, num_warps=8, num_stages=3)
        elif gemm1_steps <= 16:
            # Short loops: fetching a TMA descriptor costs more than the address arithmetic it saves.
            gemm1 = replace(gemm1, tma=gemm1_tiles > 2 * RESIDENT_4)
        elif gemm1_split > 1:
            # Four stages take the shared memory of a fourth program, which a split k loop needs.
            gemm1 = replace(gemm1, num_stages=3)
    return TilePlan(gemm1, gemm2)


def _fits_16_rows(tiles: int, split: int) -> bool:
    """Whether the tail wave of split 8-row tiles is nearly empty, but not that of 16-row tiles."""
    eight, sixteen = tiles * split / RESIDENT_8, tiles / RESIDENT_4
    return 2 < eight < 4 and eight % 1 < 0.25 and sixteen > 1 and sixteen % 1 > 0.6
