"""Launch configurations of mixed_input: 16-bit activations, and weights that were repacked at load.

Every product is transposed (`swap_ab`).  Tiles of 4-bit words have 128 rows of weights and four warps: the 16-bit
numbers of more do not fit their registers.  Beside up to five rows per expert sm_90 takes tiles of 8 rows for them,
multiplied by `mma.sync`: few registers, so that twice as many programs keep loads in flight.  Tiles of 16 and 32 rows
get a limit on registers there, where one program more on a multiprocessor saves a round.  With more than 14 rows per
expert, of e2m1 28, sm_90 has a kernel of its own for them, which dequantises beside the tensor cores
(`moe_core.kernels.gemm.sm90.mixed_input`).  8-bit words take twice the shared memory: tiles of 128 rows of activations
would leave one program of four warps on a multiprocessor, and get 256 rows of weights and eight warps, or two stages.
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

#: programs of four warps that 132 multiprocessors hold at a time
RESIDENT_4 = 2 * RESIDENT
#: registers of a thread, by rows of a tile of four warps, with which a multiprocessor of sm_90 holds `PROGRAMS` of
#: a GEMM: one more than with those that the compiler takes; nothing spills, but 8 bytes of float16 with zero points
MAX_REGISTERS = {16: 128, 32: 168}
PROGRAMS = {16: 4, 32: 3}
MULTIPROCESSORS = 132
#: programs with tiles of 8 rows that run at a time, and steps of the loops that are worth parts for two whole rounds
RESIDENT_8 = 5 * MULTIPROCESSORS
LONG_LOOP = 20
#: steps of gemm2's loop up to which int4 needs no more than two warps for a tile of 8 rows
SHORT_LOOP = 2
#: tiles of 8 rows that an expert has in the mean, up to which they are ahead of tiles of 16
MOST_TILES_OF_8 = 1.15


def mixed_input_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Of integers and e4m3; e2m1 takes more instructions to dequantise, so that tiles with more rows pay sooner."""
    plan = _tiles(problem, tokens)
    if problem.capability != 90 or problem.dtype_bytes != 2 or problem.batch_invariant:
        return plan
    gemm1, gemm2 = plan.gemm1, plan.gemm2
    columns = problem.intermediate_size * (2 if problem.gated else 1)
    tiles = expected_tiles(problem, tokens, gemm1.block_m) * problem.num_experts * steps_of(columns)
    # of 16 rows few types take more: groups of 128 with zero points, or with scales in pairs
    if gemm1.block_m == 32 or _saves_a_round(gemm1.block_m, tiles * gemm1.split_k):
        gemm1 = with_registers(problem, gemm1)
    tiles = expected_tiles(problem, tokens, gemm2.block_m) * problem.num_experts * steps_of(problem.hidden_size)
    if _saves_a_round(gemm2.block_m, tiles * gemm2.split_k):
        gemm2 = with_registers(problem, gemm2)
    return replace(plan, gemm1=gemm1, gemm2=gemm2)


def with_registers(problem: LayerProblem, config: TileConfig) -> TileConfig:
    """``config`` of the tile kernel with `MAX_REGISTERS`, where it is one for them."""
    four_warps = (config.block_n, config.num_warps, config.warp_specialised) == (BLOCK_N, 4, False)
    # of 16 rows e2m1 takes few registers anyway; 8-bit words were slower, or not measured
    known = config.block_m == 32 or (config.block_m == 16 and problem.element == "int4")
    limited = problem.family == "mixed_input" and four_warps and known
    return replace(config, max_registers=MAX_REGISTERS[config.block_m] if limited else 0)


def _saves_a_round(rows: int, programs: float) -> bool:
    """Whether so many programs run in fewer rounds if a multiprocessor holds one more, each of which is slower then."""
    if rows not in PROGRAMS:
        return False
    most = PROGRAMS[rows] * MULTIPROCESSORS
    fewer = most - MULTIPROCESSORS
    # what is left of a round is in the mean: within a twentieth some calls have none
    return programs > 3 * fewer or math.ceil(programs / most) < math.ceil(0.95 * programs / fewer)


def _tiles(problem: LayerProblem, tokens: int) -> TilePlan:
    mean = problem.rows_per_expert(tokens)
    if problem.dtype_bytes == 4:
        return float32_plan()
    if lacks_shared_memory(problem.capability):
        return small_shared_plan(problem, tokens)
    hopper, four_bits, gemm2_steps = problem.capability == 90, problem.bits == 4, steps_of(problem.intermediate_size)
    # of 4-bit words tiles of 32 rows take more time than those of 16, of which a second one finds L2 warm
    if mean <= 12 or (four_bits and expected_tiles(problem, tokens, 16) <= (1.3 if hopper else 1.5)):
        return _few_rows(problem, tokens)
    e2m1 = problem.element == "e2m1"
    few, some, many = swapped(32, 4, 3), swapped(64, 4, 3, tma=False), swapped(128, 4, 3, tma=False)
    # a second tile of few steps is not worth what the other kernel saves there
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
        # h has room for whole tiles of 128 columns, which 256 rows of a product without halves may exceed
        if problem.gated or gemm2_steps % 2 == 0:
            return TilePlan(swapped(128, 8, 3, block_n=2 * BLOCK_N), gemm2)
        return TilePlan(swapped(128, 4, 2), gemm2)
    if special:
        # the warp-specialised kernel takes the rows of the schedule's tiles; the rest is for where it can't
        some, many = (replace(config, warp_specialised=True, group_m=1) for config in (some, many))
        one = some if expected_tiles(problem, tokens, 64) <= 1.2 else many
        return TilePlan(one, one)
    if mean <= 48:
        return TilePlan(some if e2m1 else few, swapped(64, 4, 3, group=1))
    if mean <= 96:
        return TilePlan(some, some)
    return TilePlan(many, many if mean > 384 else some)


def takes_8_rows(problem: LayerProblem) -> bool:
    """Whether tiles of 8 rows are worth it at all: their instruction sums otherwise than that of more rows."""
    return problem.capability == 90 and problem.bits == 4 and problem.dtype_bytes == 2 and not problem.batch_invariant


def _few_rows(problem: LayerProblem, tokens: int) -> TilePlan:
    """Tiles of 8 or 16 rows, whose k loops may be split.

    Of 8 rows a multiprocessor holds six programs, and reading is all that they wait for.
    """
    eight_rows = takes_8_rows(problem) and expected_tiles(problem, tokens, 8) <= MOST_TILES_OF_8
    # 8: where many experts have two tiles
    rows, group = (8 if eight_rows else 16), (1 if problem.rows_per_expert(tokens) <= 12 else 8)
    if not (eight_rows or problem.may_split):
        return TilePlan(swapped(16, 4, 4, group=group), swapped(16, 4, 3, group=group))
    pairs, bits = tokens * problem.top_k, problem.bits
    width = problem.intermediate_size * (2 if problem.gated else 1)
    gemm1_steps, gemm2_steps = steps_of(problem.hidden_size), steps_of(problem.intermediate_size)
    gemm1_limits: Limits
    gemm2_limits: Limits
    if eight_rows:
        # up to three rounds of long parts: a second round that is nearly empty costs more than adding parts up
        shorter = ((1800, 8), (720, 5)) if problem.element == "int4" else ()
        # gemm2: most of one round
        gemm1_limits, gemm2_limits = ((2300, 16), *shorter, (512, 4)), ((int(1.03 * RESIDENT_8), 5),)
        experts, most_tiles = problem.reached(tokens), math.inf
    else:
        # parts of eight steps at least, and up to three rounds; shorter ones only where multiprocessors are left over
        gemm1_limits = (1800, 8), (720, 5), (512, 4)
        gemm2_limits = ((1056, 28), (400, 5), (264, 3)) if bits == 4 else ((264, 4),)
        experts, most_tiles = min(pairs, problem.num_experts), RESIDENT_4
    gemm1_tiles, gemm2_tiles = int(experts * steps_of(width)), int(experts * gemm1_steps)

    def split(tiles: int, steps: int, columns: int, limits: Limits, most: int = 16) -> int:
        # numbers of each part's result have room
        most = min(most, MAX_PARTIALS // max(pairs * columns, 1))
        return split_k(tiles, steps, *limits, most=most) if tiles < most_tiles else 1

    gemm1_split = split(gemm1_tiles, gemm1_steps, width, gemm1_limits)
    if eight_rows and problem.element == "int4":
        # six rounds of parts, which are written and read (8 bytes a number) for at most 1/30 of the weights' bytes
        few = int(experts * problem.hidden_size * bits / (30 * 64 * max(pairs, 1)))
        gemm1_split = max(gemm1_split, split(gemm1_tiles, gemm1_steps, width, ((4800, 8),), min(few, 16)))
    gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, gemm2_limits)
    if eight_rows and 0.95 * RESIDENT_8 < gemm2_tiles < 1.8 * RESIDENT_8 and gemm2_steps > LONG_LOOP:
        # two rounds instead of one and a few programs, or a half
        gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, ((4 * RESIDENT_8, 5),), 2)
    elif eight_rows and 1 < gemm2_tiles * gemm2_split / RESIDENT_8 < 1.1 and gemm2_split > 1:
        # four rounds of shorter parts instead
        gemm2_split = split(gemm2_tiles, gemm2_steps, problem.hidden_size, ((5 * RESIDENT_8, 5),), 4 * gemm2_split)
    gemm1 = swapped(rows, 4, 4 if gemm1_steps > 16 and not eight_rows else 3, group=group, split=gemm1_split)
    gemm2 = swapped(rows, 4, 3, group=group, split=gemm2_split)
    if eight_rows and gemm1_steps > LONG_LOOP and _fits_16_rows(gemm1_tiles, gemm1_split):
        gemm1 = swapped(16, 4, 3, group=group)
    if eight_rows and problem.element == "int4" and gemm2_steps <= SHORT_LOOP:
        gemm2 = replace(gemm2, num_warps=2)
    if bits == 8:
        # two programs for each multiprocessor at most are better off with eight warps
        depth = gemm2_steps // gemm2_split
        eight = gemm2_tiles * gemm2_split <= RESIDENT and depth <= 32
        gemm2 = replace(gemm2, num_warps=8 if eight else 4, num_stages=4 if depth > 16 else 3)
        if gemm1_tiles * gemm1_split <= RESIDENT:
            gemm1 = replace(gemm1, num_warps=8, num_stages=3)
        elif gemm1_steps <= 16:
            # short loops: fetching a tensor map costs more than the addresses that it saves
            gemm1 = replace(gemm1, tma=gemm1_tiles > 2 * RESIDENT_4)
        elif gemm1_split > 1:
            # four stages take the room of a fourth program, which parts of a loop need
            gemm1 = replace(gemm1, num_stages=3)
    return TilePlan(gemm1, gemm2)


def _fits_16_rows(tiles: int, split: int) -> bool:
    """Whether the last round of split tiles of 8 rows is nearly empty, and that of two or three of 16 rows is not."""
    eight, sixteen = tiles * split / RESIDENT_8, tiles / RESIDENT_4
    return 2 < eight < 4 and eight % 1 < 0.25 and sixteen > 1 and sixteen % 1 > 0.6
