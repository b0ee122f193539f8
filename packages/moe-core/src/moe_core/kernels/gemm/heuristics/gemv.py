"""Launch configurations of a layer whose pairs are not sorted, for few tokens.

A pair reads its expert's weights, from L2 where another pair of that expert has just read them; tiles read them once
for each expert that is reached, by random choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from moe_core.kernels.gemm.heuristics.mixed_input import RESIDENT_4, takes_8_rows
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.heuristics.tiles import MAX_PARTIALS, RESIDENT, steps_of

#: pairs for each expert that is reached, up to which vectors are ahead of tiles on sm_90, for more than one token:
#: (tokens up to which that holds, of experts of more than SMALL numbers, of smaller ones).  More tokens would gain a
#: few per cent under uniform routing, but share more experts, and lose to tiles, under any other
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
#: the same on GPUs without tiles of 8 rows
SHARED_ELSEWHERE = {"int8": 1.15, "e4m3": 1.07}
#: the most of more than FEW tokens where experts are on several ranks: rows that other ranks send have an expert here
#: each, and share more than rows that may have none
SHARED_SENT = 1.2
FEW = 4
#: tokens of 8-bit weights and activations
MOST_SCALED = 12
#: bytes that pairs read again, from which on neighbouring programs have the same rows of weights; with less they have
#: the same pair, and rows that lie side by side
AGAIN = 17e6
#: warps of words that 132 multiprocessors hold at a time, 128 registers a thread; and parts of that many which are
#: enough for a round, and for each of several
RESIDENT_WARPS = 4 * RESIDENT_4
FULL = 0.6
FULL_ROUNDS = 0.8
#: columns of vectors up to which they have room in shared memory: numbers of e4m3 are float16 there, those beside e2m1
#: stand in eight columns
LONGEST = {"e4m3": 32768, "int8": 65536, "e2m1": 16384}
#: intermediate size beyond which 8-bit weights take long steps in gemm2, from which int8 does not add up pairs there,
#: and up to which e4m3 does: for one token, and for more
LONG = 2048
SHORT = 1024
SHORTEST = 256
#: hidden size from which int8 asks for three steps of 16 rows ahead
DEEP = 4096


@dataclass(frozen=True)
class GemvConfig:
    """Launch parameters of a matrix times a vector: ``block_n`` rows (of both halves), ``block_w`` words of each.

    ``block_w`` words are multiplied at a time; ``num_stages`` times as many are requested ahead, by the kernel of 8-bit
    weights and activations.  ``mma_sync``: 4-bit words are multiplied by `mma.sync`: four warps have 64 rows, or share
    the columns of 32 or 16, and ``block_w`` words of each row are requested ahead.

    ``along_m``: neighbouring programs have the same rows of weights, of all pairs; what pairs share comes from L2.
    """

    block_n: int
    block_w: int
    num_warps: int
    mma_sync: bool = False
    num_stages: int = 1
    along_m: bool = False


@dataclass(frozen=True)
class GemvPlan:
    """The layer by vectors.

    ``fuse_finalize``: programs of gemm2 have all pairs of a token, in groups of warps, and add them up: a power of two,
    at most one for each warp.  ``gemm2.block_n`` are then rows of all of them.  Words have one pair alone.
    """

    gemm1: GemvConfig
    gemm2: GemvConfig
    pdl: bool = False
    fuse_finalize: bool = False

    def interpreted(self) -> GemvPlan:
        """The same for Triton's interpreter, which knows neither dependent launches nor `mma.sync`."""
        gemm1, gemm2 = (
            replace(config, mma_sync=False, block_w=128) if config.mma_sync else config
            for config in (self.gemm1, self.gemm2)
        )
        return replace(self, gemm1=gemm1, gemm2=gemm2, pdl=False)


def choose_gemv(problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """The plan for one token, or a few that share few experts; None for more."""
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
    """Pairs for each expert that is reached, up to which vectors are ahead of tiles; 0 for more tokens than any.

    Beside tiles of 16 rows of int4 a pair takes two thirds of the time of an expert, which takes less the more there
    are.  Tiles of small experts use the memory worse; pairs of int8 have the least to do, and its tiles the most.
    """
    element, scaled = problem.element, problem.family == "scaled_mm"
    if element == "int4" and not takes_8_rows(problem):
        return 1.55 - tokens / 64
    if not scaled and problem.capability != 90 and element in SHARED_ELSEWHERE:
        return SHARED_ELSEWHERE[element]
    kind: str = "e2m1 by mma.sync" if by_mma_sync else element
    if scaled:
        kind = f"scaled {element} in blocks" if element == "e4m3" and problem.group_size != -1 else f"scaled {element}"
    # of one pair there is little to read besides
    small = _expert(problem) <= SMALL or (element == "int4" and problem.top_k == 1)
    return next((limits[small] for most, *limits in SHARED[kind] if tokens <= most), 0.0)


def _expert(problem: LayerProblem) -> int:
    """Numbers of an expert's weights."""
    return problem.hidden_size * problem.intermediate_size * (3 if problem.gated else 2)


def _has_room(problem: LayerProblem) -> bool:
    return max(problem.hidden_size, problem.intermediate_size) <= LONGEST[problem.element]


def _takes_scaled(problem: LayerProblem) -> bool:
    """Whether vectors are for 8-bit weights and activations: two or three launches instead of four or five.

    Measured on sm_90 alone.
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
    """16 rows of each half for a program of gemm1, or 8 for twice as many programs.

    With scales of blocks few programs are best in whole rounds of the GPU: those of 16 rows last twice as long.
    """
    size, top_k = problem.intermediate_size, problem.top_k
    if problem.group_size == -1:
        return 16 if top_k * steps_of(size, 16) >= RESIDENT else 8
    programs, twice = (tokens * top_k * steps_of(size, rows) for rows in (16, 8))
    fills = programs >= 2 * RESIDENT
    return 16 if fills or 2 * steps_of(programs, RESIDENT) <= steps_of(twice, RESIDENT) else 8


def _fused_gemm2(problem: LayerProblem, tokens: int) -> GemvConfig | None:
    """The configuration of a gemm2 that adds up a token's pairs, where that is ahead of a launch more.

    A warp quantises the vector of its pair for a few rows alone, which is little work in int8; for e4m3 it is less than
    a launch where vectors are short, and all programs run at a time.
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
    """Long rows are shared by all four warps."""
    if problem.hidden_size <= 2048:
        config = GemvConfig(32, 64, 4, mma_sync=True)
        return GemvPlan(config, config, pdl=True)
    # few programs: more of a row is requested ahead
    ahead = 192 if tokens == 1 else 128
    return GemvPlan(GemvConfig(16, 128, 4, mma_sync=True), GemvConfig(16, ahead, 4, mma_sync=True), pdl=True)


def _words_plan(problem: LayerProblem, tokens: int, pdl: bool) -> GemvPlan:
    hidden, size, bits = problem.hidden_size, problem.intermediate_size, problem.bits
    rows = problem.top_k * size * (2 if problem.gated else 1)
    gemm1 = _config(problem, rows, tokens, steps_of(hidden) * 4 * bits, 16)
    gemm2 = _config(problem, problem.top_k * hidden, tokens, steps_of(size) * 4 * bits, 32)
    return GemvPlan(gemm1, gemm2, pdl)


def _config(problem: LayerProblem, rows: int, tokens: int, words: int, block_n: int) -> GemvConfig:
    """For ``rows`` of each token, of so many words; ``block_n`` of e4m3.

    As few warps for the words of a row as leave enough for the GPU: what warps share goes through shared memory.
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
        # few programs: more of a row at a time
        return GemvConfig(16, 256, 4)
    if bits == 4:
        return GemvConfig(16, 256 if words >= 512 and words % 256 == 0 else 128, 1 if words <= 128 else 2)
    return GemvConfig(block_n, 128, 4)


def _fills(warps: int) -> bool:
    """Whether so many warps are most of a round of the GPU, or of more, the last of which is not nearly empty."""
    rounds = steps_of(warps, RESIDENT_WARPS)
    return warps >= (FULL if rounds == 1 else FULL_ROUNDS) * rounds * RESIDENT_WARPS
