"""Launch rules of each element type: its regimes, from few rows per expert to many.

With few rows, a call is bound by streaming weights. Then tiles have 8 to 32 rows, and programs share the mainloop of a
tile (split-K) where the tiles alone do not fill the device. With many rows, the tensor cores are the limit. Then taller
tiles pay, because each loaded or dequantized weight enters more MMAs. The measurements are in docs/design.

A row of a table states the GEMMs' tiles, and up to how many rows or tiles per expert they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from typing import Any

from moe_core.errors import ConfigError
from moe_core.kernels.gemm.heuristics.cost import (
    BLOCK_N,
    MULTIPROCESSORS,
    RESIDENT,
    RESIDENT_4,
    RESIDENT_8,
    Loops,
    Speed,
    expected_tiles,
    steps_of,
)
from moe_core.kernels.gemm.heuristics.gemv import LONGEST, GemvRules, mma_sync_plan, scaled_plan, words_plan
from moe_core.kernels.gemm.heuristics.problem import Family, LayerProblem
from moe_core.kernels.gemm.heuristics.regimes import LONG_LOOP, NEVER, WHOLE, Change, Regime, Split, Tile, within
from moe_core.kernels.gemm.plan import TileConfig, TilePlan

#: Rows of the table of one layer, from few rows per expert to many. The last one has no limit.
Regimes = tuple[Regime, ...]


def swapped(rows: int, warps: int, stages: int, *changes: Change, split: Split = WHOLE, **fields: Any) -> Tile:
    """Return a tile of the transposed GEMM (`swap_ab`): its rows are columns of the instruction.

    Args:
        rows: Rows of a tile.
        warps: Warps per program.
        stages: Pipeline stages.
        changes: Exceptions for some calls.
        split: Rule for the number of programs that share a mainloop.
        fields: Other fields of `TileConfig`. By default 8 row tiles are rasterized together and weights read by TMA.

    Returns:
        The tile.
    """
    fields = {"block_n": BLOCK_N, "group_m": 8, "tma": True} | fields
    return Tile(TileConfig(rows, num_warps=warps, num_stages=stages, swap_ab=True, **fields), split, changes)


#: float32 operands have no tensor cores: a small tile keeps them in registers.
FLOAT32 = (Regime(swapped(16, 8, 1, group_m=1, tma=False)),)


def lacks_shared_memory(capability: int) -> bool:
    """Whether a program has only about 100 KB of shared memory, or the device is unknown.

    Args:
        capability: Compute capability (sm_89 and sm_120 have little shared memory); 0 without an NVIDIA GPU.

    Returns:
        True unless the device is sm_90 to sm_119.
    """
    return not 90 <= capability < 120


def small_shared(*warps: int) -> Regimes:
    """Return the table of the transposed GEMM for little shared memory: two stages.

    Args:
        warps: Warps for tiles of 16, 32 and 64 rows. Fewer values end the table earlier.

    Returns:
        The regimes.
    """
    given = ((16, 12, 1), (32, 24, 8), (64, inf, 8))
    rows = [
        Regime(swapped(height, count, 2, group_m=group, tma=False), rows=most)
        for (height, most, group), count in zip(given, warps, strict=False)
    ]
    return *rows[:-1], replace(rows[-1], rows=inf)


def decoded(problem: LayerProblem, *, scaled_values: bool = False) -> Regimes:
    """Return the table for weights that plain Triton operations decode.

    These are int4 weights that become int8, and the as_stored layout. Each decoded value should enter as many products
    as registers allow.

    Args:
        problem: The layer.
        scaled_values: Whether scales are applied to values, not to sums.

    Returns:
        The regimes.
    """
    as_stored, stepwise = problem.family == "as_stored", problem.group_size != -1
    capability = problem.capability
    if as_stored and problem.dtype_bytes == 4:
        return FLOAT32
    if lacks_shared_memory(capability) or problem.permuted:
        if not as_stored:
            return small_shared(4, 8) if stepwise else small_shared(4, 8, 8)
        # Per-column scales are gathered, which no pipeline hides. Without an NVIDIA GPU, the partial sums
        # of a step spill next to sums of 32 rows.
        return small_shared(*(8, 8, 8) if not stepwise and not scaled_values else (8, 8) if capability else (8,))
    # Two programs of eight warps on each SM, or four of four warps if there are more programs.
    eight = Change({"programs1": (0, RESIDENT)}, {"num_warps": 8})
    short = Change({"steps": (0, 2)}, {"num_stages": 2})
    split = within((RESIDENT, 4))
    # The four partial sums of a step, or the scales of its columns, need more registers than four warps have.
    wide = as_stored and (problem.group_size == 32 or (stepwise and scaled_values))
    few, many = swapped(64, 8, 3), swapped(128, 8, 3)
    first = (
        Regime(
            swapped(16, 4, 4, eight, group_m=1, split=split),
            swapped(16, 4, 3, eight, short, group_m=1, split=split),
            rows=12,
        ),
        Regime(swapped(32, 8 if wide else 4, 3, group_m=1), rows=24),
    )
    # Beyond sm_90, Triton multiplies int8 as on sm_80, with both operands in registers. Two accumulators of 128 x 128
    # leave no registers for a separate partial sum per step.
    if stepwise if as_stored else capability != 90:
        return *first, Regime(few)
    gemm1 = few if stepwise else many
    return *first, Regime(few, rows=48), Regime(gemm1, few, rows=384), Regime(gemm1, many)


#: Rows per expert, and rows times the intermediate size, up to which gemm1 has tiles of 64 rows.
FEW_ROWS, FEW_ELEMENTS = 128, 32768
#: `LayerProblem.balance` above which memory is as slow relative to the tensor cores as an H100's.
SLOW = 150
#: Bytes of an expert's gemm1 weights that stay in L2.
IN_L2 = 32 << 20


def scaled(problem: LayerProblem) -> Regimes:
    """Return the table for 8-bit activations and 8-bit weights.

    A tile is as wide as a step is deep: one group of the scales of the weights, and one of the scales of h.

    Args:
        problem: The layer.

    Returns:
        The regimes.
    """
    block, capability = BLOCK_N if problem.group_size == -1 else problem.group_size, problem.capability
    if lacks_shared_memory(capability):
        few, some, many = (
            Tile(TileConfig(rows, block, warps, 2, group))
            for rows, warps, group in ((16, 4, 1), (32, 8 if block >= 128 else 4, 8), (64, 8, 8))
        )
        if not capability:
            # AMD: more rows or more warps spill where gfx942 widens e4m3.
            return Regime(few, rows=24), Regime(Tile(replace(few.config, group_m=8)))
        return Regime(few, rows=24), Regime(some, rows=100), Regime(many)
    # Few programs leave SMs idle. A tile of one half leaves space for other programs on the SM.
    split1, split2 = within((132 if problem.gated else 396, 4)), within((RESIDENT, 4))
    short = Change({"steps": (0, 2)}, {"num_stages": 2})
    # float32 rows that are quantized on load leave space for five stages.
    deep = Change({"steps": (32, inf)}, {"num_stages": 5 if problem.dtype_bytes == 4 else 6})
    shared = Change({"split": (2, inf)}, {"num_stages": 4})
    middle = Change({"steps": (16, inf)}, {"num_stages": 5})
    # Either two programs per SM, or one with more steps in flight. The latter is faster for long mainloops.
    long = Change({"steps": (32, inf), "split": (1, 1)}, {"num_stages": 4 if problem.group_size == -1 else 5})

    def tile(rows: int, split: Split, *changes: Change) -> Tile:
        return swapped(rows, 4, 3, *changes, group_m=1, block_n=block, split=split)

    first = (
        # Both heights stream weights. What the second tile of an expert reads again decides.
        Regime(tile(16, split1, deep, shared), tile(16, split2, short, middle), tiles=1.05),
        Regime(tile(32, split1, long), tile(32, split2, short, long), rows=24),
    )
    few = Tile(TileConfig(64, block, 8, 4, 1, tma=True))
    grouped = Tile(replace(few.config, group_m=8))
    if capability != 90:
        return *first, Regime(few, rows=64), Regime(grouped, Tile(TileConfig(64, block, 4, 3, 8, tma=True)))
    # Row tiles advance together, unless L2 still holds the expert's weights for its second tile. Pointers, not
    # descriptors: 128 x 2 x 128 accumulators leave no registers for the descriptors' bookkeeping.
    group = 1 if problem.hidden_size * problem.width <= IN_L2 else 8
    config = TileConfig(128, block, 8, 3, group, warp_specialized=True)
    many1, many2 = (Tile(config, short=short) for short in _short_tiles(problem))
    # Most of 128 rows would be empty. gemm1 suffers from that, more so the fewer columns it has; gemm2 does not.
    most = max(48, min(FEW_ROWS, FEW_ELEMENTS / problem.intermediate_size))
    return *first, Regime(grouped, many2, rows=most), Regime(many1, many2)


def _short_tiles(problem: LayerProblem) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the rows per expert at which the warp-specialized kernel computes 64 rows of short tiles, per GEMM.

    Two column blocks at a time request weights at another rate than a whole tile running alongside. Over long mainloops
    one gets ahead of the other, and L2 no longer holds what both read. Where products are summed over all of k,
    consumers release a stage one iteration later, and starve with half of the stages. Where memory is the limit, fewer
    products gain nothing.
    """
    hidden, inner, by_memory = problem.hidden_size, problem.intermediate_size, 1.05 * problem.balance
    if problem.group_size == -1:
        return NEVER, NEVER
    # With only two column blocks (N = 256), all work consists of pairs of column blocks. Measured from N = 768 on.
    gemm1 = NEVER
    if hidden <= 8192 and inner >= (512 if hidden <= 4096 else 1024):
        gemm1 = (by_memory if hidden <= 4096 else max(by_memory, 144), inf)
    # With many rows, short tiles are rare, and programs with short loops inspect each tile before they take it. In
    # short loops the rows of h come from L2. An H200 gains from 48 rows per expert on.
    gemm2 = (by_memory if inner > 512 and problem.balance > SLOW else 0, 224) if inner <= 4096 else NEVER
    return gemm1, gemm2


def scaled_e2m1(problem: LayerProblem) -> Regimes:
    """Return the table for e2m1 weights, which become e4m3 in registers.

    Args:
        problem: The layer.

    Returns:
        The regimes.
    """
    capability = problem.capability
    if lacks_shared_memory(capability):
        return small_shared(4, 4, 8)
    # The workspace for partial sums holds 528 programs of 16 rows.
    few, more = (
        swapped(16, 4, 4, group_m=1, split=within((400, 5))),
        swapped(32, 4, 3, group_m=1, split=within((RESIDENT, 5))),
    )
    # Sums of sm_100 are in tensor memory but pass through the registers of four warps in one piece. LoRA deltas do not
    # fit in registers next to the sums of two halves.
    warps = 8 if capability >= 100 and problem.gated and problem.lora else 4
    some = swapped(64, warps, 3)
    many = swapped(128, 4, 4) if capability < 100 else swapped(128, 8, 3)
    # Sums of two halves of 64 columns take as many registers as sums of one half of 128 columns. Values that an
    # epilogue quantizes are padded to whole 128 columns.
    narrow = swapped(128, warps, 4, block_n=BLOCK_N // 2) if problem.gated else many
    return (
        Regime(few, rows=12),
        Regime(more, rows=24),
        Regime(some, swapped(64, 4, 3), rows=96),
        Regime(some if problem.quantizes_h else narrow, many),
    )


#: Mean number of 8-row tiles per expert up to which they beat tiles of 16 rows.
MOST_TILES_OF_8 = 1.15


#: gemm1's split of tiles with 8 rows: up to three waves of long splits. A second wave that is nearly empty costs more
#: than summing the partials.
THREE_WAVES = within((2300, 16), (512, 4))


def six_waves(loops: Loops) -> int:
    """Split into up to six waves, if partial sums are at most 1/30 of the weight bytes (8 bytes each)."""
    few = int(loops.weights / (30 * 8 * max(loops.sums, 1)))
    return max(loops.split((2300, 16), (1800, 8), (720, 5), (512, 4)), loops.split((4800, 8), most=min(few, 16)))


def _gemm2_split_of_8(loops: Loops) -> int:
    """Return gemm2's split of tiles with 8 rows: most of one wave."""
    split = loops.split((int(1.03 * RESIDENT_8), 5))
    if 0.95 * RESIDENT_8 < loops.tiles < 1.8 * RESIDENT_8 and loops.steps > LONG_LOOP:
        # Two full waves instead of one wave and a small or half-empty tail.
        return loops.split((4 * RESIDENT_8, 5), most=2)
    if 1 < loops.tiles * split / RESIDENT_8 < 1.1 and split > 1:
        # Four waves of shorter splits instead.
        return loops.split((5 * RESIDENT_8, 5), most=4 * split)
    return split


def mixed(
    problem: LayerProblem, *, slow: bool = False, split_of_8: Split = THREE_WAVES, changes_of_8: tuple[Change, ...] = ()
) -> Regimes:
    """Return the table for 16-bit activations, and weights that are repacked at load time.

    - Tiles of 4-bit words have 128 weight rows and four warps, because the 16-bit values of more rows do not fit in
      registers.
    - With up to five rows per expert, sm_90 uses tiles of 8 rows for 4-bit words, multiplied by `mma.sync`. They need
      few registers, so that twice as many programs keep loads in flight.
    - With more than 14 rows per expert (e2m1: 28), sm_90 has a dedicated kernel for 4-bit words, which dequantizes
      while the tensor cores multiply (`moe_core.kernels.gemm.sm90.mixed_input`).
    - 8-bit words take twice the shared memory. Tiles of 128 activation rows would leave one program of four warps per
      SM. They get 256 weight rows and eight warps, or two stages.

    Args:
        problem: The layer.
        slow: Whether dequantizing takes more instructions, so that taller tiles pay sooner.
        split_of_8: Split of gemm1's tiles with 8 rows.
        changes_of_8: Exceptions of gemm2's tiles with 8 rows.

    Returns:
        The regimes.
    """
    if problem.dtype_bytes == 4:
        return FLOAT32
    if lacks_shared_memory(problem.capability):
        return small_shared(4, 8, 8)
    few = _few_rows(problem, split_of_8, changes_of_8)
    return few + (_words_of_8_bits(problem) if problem.bits == 8 else _words_of_4_bits(problem, slow))


def _few_rows(problem: LayerProblem, split_of_8: Split, changes_of_8: tuple[Change, ...]) -> Regimes:
    """Return the regimes of 8 and 16 rows, whose mainloops may be split."""
    gemm1, gemm2 = _tiles_of_16(problem)
    found = [Regime(gemm1, gemm2, rows=12)]
    if problem.bits == 4:
        # A tile of 32 rows takes longer than one of 16 rows, and a second tile of 16 rows finds L2 warm. A group of 8
        # suits calls where many experts have two tiles.
        one, two = (replace(tile, config=replace(tile.config, group_m=8)) for tile in (gemm1, gemm2))
        found.append(Regime(one, two, tiles=1.3 if problem.capability == 90 else 1.5))
    # Their instruction is another than that of taller tiles, so sums differ.
    if problem.capability == 90 and problem.bits == 4 and problem.dtype_bytes == 2 and not problem.batch_invariant:
        gemm1 = swapped(8, 4, 3, group_m=1, split=split_of_8)
        gemm2 = swapped(8, 4, 3, *changes_of_8, group_m=1, split=_gemm2_split_of_8)
        # An SM holds five programs with tiles of 8 rows. Those are bound by memory reads alone.
        found.insert(
            0, Regime(gemm1, gemm2, tiles=MOST_TILES_OF_8, reached=True, taller=swapped(16, 4, 3, group_m=1).config)
        )
    return tuple(found)


def _tiles_of_16(problem: LayerProblem) -> tuple[Tile, Tile]:
    if not problem.may_split:
        return swapped(16, 4, 4, group_m=1), swapped(16, 4, 3, group_m=1)
    # Splits of at least eight steps, up to three waves; shorter ones only where SMs would be idle.
    split1 = within((1800, 8), (720, 5), (512, 4), below=RESIDENT_4)
    if problem.bits == 4:
        more = Change({"steps": (17, inf)}, {"num_stages": 4})
        split2 = within((1056, 28), (400, 5), (264, 3), below=RESIDENT_4)
        return swapped(16, 4, 3, more, group_m=1, split=split1), swapped(16, 4, 3, group_m=1, split=split2)
    gemm1 = (
        # Four stages take the shared memory of a fourth program, which a split mainloop needs.
        Change({"steps": (17, inf), "split": (1, 1)}, {"num_stages": 4}),
        # Short loops: fetching a TMA descriptor costs more than the address arithmetic it saves.
        Change({"steps": (0, 16), "tiles": (0, 2 * RESIDENT_4)}, {"tma": False}),
        # At most two programs per SM: eight warps are faster.
        Change({"programs": (0, RESIDENT)}, {"num_warps": 8, "num_stages": 3, "tma": True}),
    )
    gemm2 = (
        Change({"programs": (0, RESIDENT), "depth": (0, 32)}, {"num_warps": 8}),
        Change({"depth": (17, inf)}, {"num_stages": 4}),
    )
    split2 = within((264, 4), below=RESIDENT_4)
    return swapped(16, 4, 3, *gemm1, group_m=1, split=split1), swapped(16, 4, 3, *gemm2, group_m=1, split=split2)


def _words_of_8_bits(problem: LayerProblem) -> Regimes:
    steps = steps_of(problem.intermediate_size)
    few, some = swapped(32, 4, 3), swapped(64, 4, 3, tma=False)
    wide = swapped(64, 8, 3, block_n=2 * BLOCK_N) if steps > 8 else some
    # Rows of h have space for whole tiles of 128 columns, which 256 rows of an ungated GEMM may exceed.
    fits = problem.gated or steps % 2 == 0
    many = swapped(128, 8, 3, block_n=2 * BLOCK_N) if fits else swapped(128, 4, 2)
    return (
        Regime(few, rows=24),
        Regime(few, wide, rows=48),
        Regime(some, wide, rows=96),
        Regime(some, rows=384),
        Regime(many, some),
    )


def _words_of_4_bits(problem: LayerProblem, slow: bool) -> Regimes:
    hopper, short = problem.capability == 90, steps_of(problem.intermediate_size) <= 4
    few, deep, some, many = (
        swapped(32, 4, 3),
        swapped(32, 4, 4),
        swapped(64, 4, 3, tma=False),
        swapped(128, 4, 3, tma=False),
    )
    special = hopper and not (problem.permuted or problem.lora or problem.batch_invariant)
    # A second tile of few steps costs more than the warp-specialized kernel saves.
    gemm1, most = deep if slow or hopper else few, 1.2 if hopper and not short else 1.1
    thirty_two = Regime(gemm1, few if short and not slow else gemm1, tiles=most)
    if not special:
        first = Regime(some if slow else few, swapped(64, 4, 3, group_m=1), rows=48)
        return thirty_two, first, Regime(some, rows=96), Regime(many, some, rows=384), Regime(many)
    # The warp-specialized kernel uses the schedule's tile height. The other fields apply where it cannot run.
    some, many = (swapped(rows, 4, 3, group_m=1, tma=False, warp_specialized=True) for rows in (64, 128))
    return *((thirty_two,) if slow else ()), Regime(some, tiles=1.2), Regime(many)


@dataclass(frozen=True, eq=False)
class LaunchRules:
    """Launch rules of one element type in one kernel family.

    Attributes:
        regimes: Returns the table of a layer.
        gemv: When and how a layer multiplies vectors instead of tiles; None without such kernels.
        overlapping_rows: Mean rows per expert up to which launches overlap (PDL). With more rows, launches are a small
            part of the time, and programs that start early take resources from the kernel before them.
        overlapping_pairs: The same limit in pairs.
        registers: Register limit per thread by rows of a tile of 128 columns and four warps. With it an SM of sm_90
            holds `PROGRAMS` programs of a GEMM, one more than with the compiler's own choice.
    """

    regimes: Callable[[LayerProblem], Regimes]
    gemv: GemvRules | None = None
    overlapping_rows: float = 128
    overlapping_pairs: float = inf
    registers: Mapping[int, int] = field(default_factory=dict)


#: Launch rules by kernel family and element type of the weights; `add_rules` adds to them. The speeds are those of an
#: H200, fitted to calls for which vectors and tiles take about equal times.
RULES: dict[tuple[Family, str], LaunchRules] = {
    # Tiles with scales per channel take more launches than those with block scales.
    ("scaled_mm", "e4m3"): LaunchRules(
        scaled,
        GemvRules(scaled_plan, Speed(10, 5.5, 0.6), Speed(21, 4.75), Speed(16, 5.0), most=8, longest=32768),
    ),
    ("scaled_mm", "int8"): LaunchRules(
        scaled, GemvRules(scaled_plan, Speed(9.5, 5.4), Speed(29.5, 5.3), longest=65536)
    ),
    # Of few programs that start early, SMs get uneven numbers.
    ("scaled_mm", "int4"): LaunchRules(decoded, overlapping_rows=inf, overlapping_pairs=64),
    ("scaled_mm", "e2m1"): LaunchRules(scaled_e2m1, overlapping_pairs=-1),
    # Nothing spills with these registers, except 8 bytes for float16 with zero points. 16 rows of e2m1 take few
    # registers anyway. 8-bit words were slower, or not measured. Short loops of int4 need only two warps.
    ("mixed_input", "int4"): LaunchRules(
        partial(mixed, split_of_8=six_waves, changes_of_8=(Change({"steps": (0, 2)}, {"num_warps": 2}),)),
        GemvRules(words_plan, Speed(8.5, 4.5), Speed(21, 4.3), elsewhere=1.47),
        registers={16: 128, 32: 168},
    ),
    ("mixed_input", "e2m1"): LaunchRules(
        partial(mixed, slow=True),
        GemvRules(mma_sync_plan, Speed(6, 3.2), Speed(15, 3.4), longest=LONGEST, elsewhere=1.01),
        registers={32: 168},
    ),
    ("mixed_input", "int8"): LaunchRules(
        mixed, GemvRules(words_plan, Speed(10, 4.75), Speed(26, 4.45), elsewhere=1.15), registers={32: 168}
    ),
    ("mixed_input", "e4m3"): LaunchRules(
        mixed, GemvRules(words_plan, Speed(10.5, 3.85), Speed(21, 4.8), elsewhere=1.07), registers={32: 168}
    ),
    **{("as_stored", element): LaunchRules(decoded) for element in ("int4", "int8", "e4m3")},
    ("as_stored", "e2m1"): LaunchRules(partial(decoded, scaled_values=True)),
}


def add_rules(family: Family, element: str, rules: LaunchRules) -> None:
    """Add the launch rules of an element type that core does not know.

    A scheme package calls it where it defines the experts whose `LayerProblem` has this family and element.

    Args:
        family: Kernel family.
        element: Element type of the weights.
        rules: The rules.

    Raises:
        ConfigError: If this family has other rules for the element type.
    """
    if RULES.setdefault((family, element), rules) is not rules:
        raise ConfigError(f"element is {element!r}, which already has launch rules in the family {family!r}")


def rules_of(problem: LayerProblem) -> LaunchRules:
    """Return the launch rules of a layer's element type.

    Args:
        problem: The layer.

    Returns:
        The rules.

    Raises:
        ConfigError: If there are none.
    """
    found = RULES.get((problem.family, problem.element))
    if found is None:
        known = ", ".join(sorted(element for family, element in RULES if family == problem.family))
        raise ConfigError(
            f"{problem.family} has no launch rules for element {problem.element!r}; known: {known}. "
            "Import the package that defines its experts"
        )
    return found


@lru_cache(maxsize=1024)
def regimes_of(problem: LayerProblem) -> Regimes:
    """Return the regimes of tile configurations for a layer.

    Args:
        problem: The layer.

    Returns:
        The regimes, from few rows per expert to many.
    """
    return rules_of(problem).regimes(problem)


def regime_plan(problem: LayerProblem, tokens: int) -> TilePlan:
    """Return the plan of the first regime that covers a call.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        Launch configurations of both GEMMs.
    """
    regime = next(one for one in regimes_of(problem) if one.covers(problem, tokens))
    plan = regime.plan(problem, tokens)
    if problem.capability != 90 or problem.dtype_bytes != 2 or problem.batch_invariant:
        return plan
    return replace(
        plan,
        gemm1=_limited(problem, plan.gemm1, tokens, first=True),
        gemm2=_limited(problem, plan.gemm2, tokens, first=False),
    )


#: Programs with `LaunchRules.registers` that an SM of sm_90 holds, by rows of a tile.
PROGRAMS = {16: 4, 32: 3}


def with_registers(problem: LayerProblem, config: TileConfig) -> TileConfig:
    """Return ``config`` with the register limit of `LaunchRules.registers` where that applies.

    Args:
        problem: Layer properties that do not change between calls.
        config: Configuration of the tile kernel.

    Returns:
        The configuration; ``max_registers`` is 0 where no limit applies.
    """
    four_warps = (config.block_n, config.num_warps, config.warp_specialized) == (BLOCK_N, 4, False)
    return replace(config, max_registers=rules_of(problem).registers.get(config.block_m, 0) if four_warps else 0)


def _limited(problem: LayerProblem, config: TileConfig, tokens: int, *, first: bool) -> TileConfig:
    """Limit registers if one more program per SM saves a wave, although each program is slower then."""
    if config.block_m not in PROGRAMS:
        return config
    experts = expected_tiles(problem, tokens, config.block_m) * problem.num_experts
    programs = experts * steps_of(problem.width if first else problem.hidden_size) * config.split_k
    most = PROGRAMS[config.block_m] * MULTIPROCESSORS
    fewer = most - MULTIPROCESSORS
    # Tail-wave occupancy is a mean and varies between calls: within 5 %, some calls have no tail wave.
    saves = programs > 3 * fewer or math.ceil(programs / most) < math.ceil(0.95 * programs / fewer)
    # With 16 rows, few types need more registers: groups of 128 with zero points, or with paired scales.
    return with_registers(problem, config) if saves or (first and config.block_m == 32) else config
