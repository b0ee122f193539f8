"""Launch configurations of a layer for few tokens, whose pairs are not sorted.

Each pair reads its expert's weights, from L2 if another pair of that expert has just read them. Tiles read the weights
of each reached expert once; which experts are reached depends on the routing.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from moe_core.kernels.gemm.heuristics.cost import MAX_PARTIALS, RESIDENT, RESIDENT_4, steps_of
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.rules import takes_8_rows
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan

#: Pairs per reached expert up to which GEMV beats tiles on sm_90, for more than one token. Entries: (largest number of
#: tokens, limit for experts of more than SMALL weights, limit for smaller experts). Admitting more tokens would gain a
#: few percent under uniform routing, but would lose to tiles under any other routing, where pairs share more experts.
SHARED: dict[str, tuple[tuple[float, float, float], ...]] = {
    "int4": ((4, 1.47, 1.47), (12, 1.3, 1.4), (16, 1.3, 1.3), (inf, 1.2, 1.2)),
    "int8": ((8, 1.5, 1.5), (12, 1.4, 1.4), (inf, 1.15, 1.15)),
    "e4m3": ((8, 1.07, 1.2), (inf, 1.07, 1.07)),
    "e2m1": (),
    "e2m1 by mma.sync": ((8, 1.4, 1.4),),
    "scaled e4m3 in blocks": ((8, 1.105, 1.25),),
    "scaled e4m3": ((8, 1.23, 1.25),),
    "scaled int8": ((8, 1.4, 1.4), (12, 0.0, 1.4)),
}
SMALL = 14e6
#: The same limits on GPUs without tiles of 8 rows.
SHARED_ELSEWHERE = {"int8": 1.15, "e4m3": 1.07}
#: Upper bound on these limits for more than FEW tokens where experts are sharded over ranks. Every row received from
#: another rank has a local expert, so received rows share experts more often than rows that may have none.
SHARED_SENT = 1.2
FEW = 4
#: Largest number of tokens for 8-bit weights and activations.
MOST_SCALED = 12
#: Bytes of repeated weight reads from which neighboring programs take the same weight rows. Below that, neighboring
#: programs take the same pair and adjacent rows.
AGAIN = 17e6
#: Warps of the packed-word kernel that 132 SMs hold at a time with 128 registers per thread. FULL and FULL_ROUNDS are
#: the fractions of it that suffice for a single wave, and for each of several waves.
RESIDENT_WARPS = 4 * RESIDENT_4
FULL = 0.6
FULL_ROUNDS = 0.8
#: Longest vectors that fit in shared memory, in columns. Values of e4m3 are stored there as float16. Vectors multiplied
#: with e2m1 are stored in eight columns.
LONGEST = {"e4m3": 32768, "int8": 65536, "e2m1": 16384}
#: Limits on the intermediate size for 8-bit weights in gemm2. Above LONG, gemm2 takes long steps. From LONG on, int8
#: does not sum a token's pairs in gemm2. e4m3 sums them there up to SHORT for one token, and up to SHORTEST for more.
LONG = 2048
SHORT = 1024
SHORTEST = 256
#: Hidden size from which int8 prefetches three steps for tiles of 16 rows.
DEEP = 4096


def choose_gemv(problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """Return the plan for one token, or for a few that share few experts; None for more.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan, or None where tiles are faster.
    """
    pairs, reached = tokens * problem.top_k, problem.reached(tokens)
    scaled = problem.family == "scaled_mm"
    by_mma_sync = problem.element == "e2m1" and problem.capability == 90 and not scaled and _has_room(problem)
    if pairs * problem.hidden_size > MAX_PARTIALS or (scaled and not _takes_scaled(problem)):
        return None
    shared = _shared(problem, tokens, by_mma_sync)
    if problem.sharded and tokens > FEW:
        shared = min(shared, SHARED_SENT)
    if tokens > 1 and pairs > shared * reached:
        return None
    if scaled:
        plan = _scaled_plan(problem, tokens)
    else:
        pdl = 90 <= problem.capability < 120
        plan = _mma_sync_plan(problem, tokens) if by_mma_sync else _words_plan(problem, tokens, pdl)
        plan = replace(plan, fuse_finalize=problem.top_k == 1)
    along_m = (pairs - reached) * _expert(problem) * problem.bits / 8 >= AGAIN
    gemm1, gemm2 = (replace(config, along_m=along_m) for config in (plan.gemm1, plan.gemm2))
    return replace(plan, gemm1=gemm1, gemm2=gemm2)


def _shared(problem: LayerProblem, tokens: int, by_mma_sync: bool) -> float:
    """Return the pairs per reached expert up to which GEMV beats tiles.

    The result is 0 above every token limit. Compared with int4 tiles of 16 rows, a pair takes two thirds of the time of
    an expert, and an expert takes less time the more experts there are. Tiles of small experts use memory bandwidth
    worse. For int8, pairs are cheapest and tiles most expensive.
    """
    element, scaled = problem.element, problem.family == "scaled_mm"
    if element == "int4" and not takes_8_rows(problem):
        return 1.55 - tokens / 64
    if not scaled and problem.capability != 90 and element in SHARED_ELSEWHERE:
        return SHARED_ELSEWHERE[element]
    kind: str = "e2m1 by mma.sync" if by_mma_sync else element
    if scaled:
        kind = f"scaled {element} in blocks" if element == "e4m3" and problem.group_size != -1 else f"scaled {element}"
    # With one pair per token there is little else to read.
    small = _expert(problem) <= SMALL or (element == "int4" and problem.top_k == 1)
    return next((limits[small] for most, *limits in SHARED[kind] if tokens <= most), 0.0)


def _expert(problem: LayerProblem) -> int:
    """Return the number of weights of an expert."""
    return problem.hidden_size * problem.intermediate_size * (3 if problem.gated else 2)


def _has_room(problem: LayerProblem) -> bool:
    return max(problem.hidden_size, problem.intermediate_size) <= LONGEST[problem.element]


def _takes_scaled(problem: LayerProblem) -> bool:
    """Whether the GEMV handles 8-bit weights and activations.

    It takes two or three launches instead of four or five. Measured on sm_90 only.
    """
    hidden, size = problem.hidden_size, problem.intermediate_size
    if problem.capability != 90 or problem.bits != 8 or not problem.may_split or hidden % 16 or size % 16:
        return False
    return _has_room(problem)


def _scaled_plan(problem: LayerProblem, tokens: int) -> GemvPlan:
    halves = 2 if problem.gated else 1
    rows = _rows_of_half(problem, tokens)
    deep = problem.element == "int8" and rows == 16 and problem.hidden_size >= DEEP
    gemm1 = GemvConfig(max(rows * halves, 16), 128, 8, num_stages=3 if deep else 2)
    fused = _fused_gemm2(problem, tokens)
    if fused is not None:
        return GemvPlan(gemm1, fused, pdl=True, fuse_finalize=True)
    if problem.intermediate_size <= LONG:
        return GemvPlan(gemm1, GemvConfig(32, 32, 4, num_stages=2), pdl=True)
    return GemvPlan(gemm1, GemvConfig(16, 128, 4, num_stages=4), pdl=True)


def _rows_of_half(problem: LayerProblem, tokens: int) -> int:
    """Return the rows of each half per gemm1 program: 16, or 8 for twice as many programs.

    With block scales, a small number of programs works best in full waves of the GPU: programs of 16 rows take twice as
    long.
    """
    size, top_k = problem.intermediate_size, problem.top_k
    if problem.group_size == -1:
        return 16 if top_k * steps_of(size, 16) >= RESIDENT else 8
    programs, twice = (tokens * top_k * steps_of(size, rows) for rows in (16, 8))
    fills = programs >= 2 * RESIDENT
    return 16 if fills or 2 * steps_of(programs, RESIDENT) <= steps_of(twice, RESIDENT) else 8


def _fused_gemm2(problem: LayerProblem, tokens: int) -> GemvConfig | None:
    """Return the gemm2 configuration that sums a token's pairs, where that beats another launch.

    Each warp quantizes the vector of its pair for a few rows only. That is cheap for int8. For e4m3 it costs less than
    a launch where vectors are short and all programs run in one wave.
    """
    size, top_k, int8 = problem.intermediate_size, problem.top_k, problem.element == "int8"
    if top_k == 1:
        if size < LONG:
            return GemvConfig(32, 32, 4, num_stages=2)
        grouped = problem.group_size != -1
        return GemvConfig(16, 128, 8, num_stages=2) if grouped else GemvConfig(8, 128, 4, num_stages=4)
    if top_k not in (2, 4, 8) or size >= LONG:
        return None
    warps = max(top_k, 4)
    if int8:
        return GemvConfig(16 * warps, 32, warps, num_stages=2)
    if size <= SHORTEST:
        return GemvConfig(8 * warps, 32, warps, num_stages=2)
    config = GemvConfig(8 * warps, 64, warps, num_stages=2)
    programs = tokens * steps_of(problem.hidden_size, config.block_n // top_k)
    return config if size <= SHORT and programs <= RESIDENT else None


def _mma_sync_plan(problem: LayerProblem, tokens: int) -> GemvPlan:
    """Return the `mma.sync` plan; all four warps share long rows."""
    if problem.hidden_size <= 2048:
        config = GemvConfig(32, 64, 4, mma_sync=True)
        return GemvPlan(config, config, pdl=True)
    # Few programs: prefetch more of each row.
    ahead = 192 if tokens == 1 else 128
    return GemvPlan(GemvConfig(16, 128, 4, mma_sync=True), GemvConfig(16, ahead, 4, mma_sync=True), pdl=True)


def _words_plan(problem: LayerProblem, tokens: int, pdl: bool) -> GemvPlan:
    hidden, size, bits = problem.hidden_size, problem.intermediate_size, problem.bits
    rows = problem.top_k * size * (2 if problem.gated else 1)
    gemm1 = _config(problem, rows, tokens, steps_of(hidden) * 4 * bits, 16)
    gemm2 = _config(problem, problem.top_k * hidden, tokens, steps_of(size) * 4 * bits, 32)
    return GemvPlan(gemm1, gemm2, pdl)


def _config(problem: LayerProblem, rows: int, tokens: int, words: int, block_n: int) -> GemvConfig:
    """Return the configuration for ``rows`` weight rows per token of ``words`` words each.

    ``block_n`` applies to e4m3. Use as few warps per row as still fill the GPU, because results shared between warps go
    through shared memory.
    """
    integers, bits = problem.element != "e4m3", problem.bits
    if problem.element != "e2m1" and (integers or words > 64):
        narrow = GemvConfig(32, 32, 1), GemvConfig(16, 64, 1), GemvConfig(16, 128, 2)
        for config in narrow if integers else narrow[:2]:
            if config.block_w >= words or _fills(tokens * rows // config.block_n * config.num_warps):
                return config
        if integers:
            return GemvConfig(16, 256, 4)
    if words <= 64:
        return GemvConfig(32, 32, 1 if bits == 4 else 4)
    if rows <= 16 * RESIDENT_4 and words >= 256:
        # Few programs: read more of each row at a time.
        return GemvConfig(16, 256, 4)
    if bits == 4:
        return GemvConfig(16, 256 if words >= 512 and words % 256 == 0 else 128, 1 if words <= 128 else 2)
    return GemvConfig(block_n, 128, 4)


def _fills(warps: int) -> bool:
    """Whether ``warps`` fill most of one wave, or several waves without a nearly empty tail."""
    rounds = steps_of(warps, RESIDENT_WARPS)
    return warps >= (FULL if rounds == 1 else FULL_ROUNDS) * rounds * RESIDENT_WARPS
