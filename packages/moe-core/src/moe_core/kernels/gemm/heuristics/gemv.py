"""Launch configurations of a layer for few tokens, whose pairs are not sorted.

Each pair reads its expert's weights, from L2 if another pair of that expert has just read them. Tiles read the weights
of each reached expert once, but take more launches. The smaller modeled time decides (`GemvRules.times`), so the number
of pairs and their weights count, not that of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from moe_core.kernels.gemm.heuristics.cost import MAX_PARTIALS, RESIDENT, RESIDENT_4, Speed, steps_of
from moe_core.kernels.gemm.heuristics.problem import LayerProblem
from moe_core.kernels.gemm.plan import GemvConfig, GemvPlan

#: Largest number of pairs per reached expert for more than FEW tokens where experts are sharded over ranks. Every row
#: received from another rank has a local expert, so received rows share experts more often than other rows.
SHARED_SENT, FEW = 1.2, 4
#: Largest number of tokens, for which the workspace of 8-bit layers has space.
MOST = 12
#: Longest vectors that fit in shared memory next to `mma.sync`, which has them in eight columns.
LONGEST = 16384
#: Bytes of repeated weight reads from which neighboring programs take the same weight rows. Below that, neighboring
#: programs take the same pair and adjacent rows.
AGAIN = 17e6
#: Warps of the packed-word kernel that 132 SMs hold at a time with 128 registers per thread. FULL and FULL_ROUNDS are
#: the fractions of it that suffice for a single wave, and for each of several waves.
RESIDENT_WARPS = 4 * RESIDENT_4
FULL = 0.6
FULL_ROUNDS = 0.8
#: Limits on the intermediate size for 8-bit weights in gemm2. Above LONG, gemm2 takes long steps. From LONG on, int8
#: does not sum a token's pairs in gemm2. e4m3 sums them there up to SHORT for one token, and up to SHORTEST for more.
LONG = 2048
SHORT = 1024
SHORTEST = 256
#: Hidden size from which int8 prefetches three steps for tiles of 16 rows.
DEEP = 4096


@dataclass(frozen=True)
class GemvRules:
    """When and how an element type's layers multiply vectors instead of tiles.

    Attributes:
        plan: Returns the configurations for a number of tokens.
        vectors: Speed of vectors on sm_90. Each pair reads the weights of its expert.
        tiles: Speed of tiles on sm_90. Each expert's weights are read once.
        block_tiles: The same with block scales, if it differs.
        most: Largest number of tokens. With more, skewed routing makes pairs share experts more often than modeled.
        longest: Largest hidden and intermediate size of these speeds, for which vectors fit in shared memory.
        elsewhere: Pairs per reached expert at which both take equal times on other GPUs, or for longer vectors; 0 if
            there is no kernel.
    """

    plan: Callable[[LayerProblem, int], GemvPlan]
    vectors: Speed
    tiles: Speed
    block_tiles: Speed | None = None
    most: int = MOST
    longest: float = inf
    elsewhere: float = 0

    def times(self, problem: LayerProblem, tokens: int) -> tuple[float, float]:
        """Return the modeled times of vectors and of tiles, under uniform routing.

        Args:
            problem: Layer properties that do not change between calls.
            tokens: Number of tokens of the call.

        Returns:
            Both times in µs; only their ratio counts on GPUs other than sm_90.
        """
        plan, pairs = self.plan(problem, tokens), tokens * problem.top_k
        rows = plan.gemm2.block_n // (problem.top_k if plan.fuse_finalize else 1)
        loaded1 = steps_of(problem.width, plan.gemm1.block_n) * problem.hidden_size
        loaded2 = steps_of(problem.hidden_size, rows) * problem.intermediate_size
        vectors, tiles = self.vectors, self.tiles
        if not self._measured(problem):
            vectors, tiles = Speed(0, self.elsewhere), Speed(0, 1)
        elif problem.group_size != -1 and self.block_tiles is not None:
            tiles = self.block_tiles
        taken = vectors.time(pairs * problem.expert_bytes, pairs * (loaded1 + loaded2))
        return taken, tiles.time(problem.reached(tokens) * problem.expert_bytes)

    def _measured(self, problem: LayerProblem) -> bool:
        return problem.capability == 90 and max(problem.hidden_size, problem.intermediate_size) <= self.longest

    def supports(self, problem: LayerProblem, tokens: int) -> bool:
        """Whether the kernel can compute a call, and the workspace has space for its results.

        Args:
            problem: Layer properties that do not change between calls.
            tokens: Number of tokens of the call.

        Returns:
            True if it can.
        """
        hidden, inner = problem.hidden_size, problem.intermediate_size
        if tokens > self.most or tokens * problem.top_k * hidden > MAX_PARTIALS:
            return False
        if problem.family == "scaled_mm" and (hidden % 16 or inner % 16 or not problem.may_split):
            return False
        return self.elsewhere > 0 or self._measured(problem)


def choose_gemv(rules: GemvRules, problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """Return the plan for one token, or for a few that share few experts; None for more.

    Args:
        rules: Rules of the layer's element type.
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan, or None where tiles are faster or there is no kernel.
    """
    pairs, reached = tokens * problem.top_k, problem.reached(tokens)
    if not rules.supports(problem, tokens):
        return None
    vectors, tiles = rules.times(problem, tokens)
    if vectors > tiles or (problem.sharded and tokens > FEW and pairs > SHARED_SENT * reached):
        return None
    plan, along_m = rules.plan(problem, tokens), (pairs - reached) * problem.expert_bytes >= AGAIN
    gemm1, gemm2 = (replace(config, along_m=along_m) for config in (plan.gemm1, plan.gemm2))
    return replace(plan, gemm1=gemm1, gemm2=gemm2)


def scaled_plan(problem: LayerProblem, tokens: int) -> GemvPlan:
    """Return the plan for 8-bit weights and activations: two or three launches instead of four or five.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan.
    """
    rows = _gemm1_rows(problem, tokens)
    deep = problem.element == "int8" and rows == 32 and problem.hidden_size >= DEEP
    gemm1 = GemvConfig(rows, 128, 8, num_stages=3 if deep else 2)
    fused = _fused_gemm2(problem, tokens)
    if fused is not None:
        return GemvPlan(gemm1, fused, pdl=True, fuse_finalize=True)
    size = problem.intermediate_size
    # Long steps of 512 columns, unless the last one is mostly padding.
    if size <= LONG or 512 * steps_of(size, 512) > 1.1 * size:
        return GemvPlan(gemm1, GemvConfig(32, 32, 4, num_stages=2), pdl=True)
    return GemvPlan(gemm1, GemvConfig(16, 128, 4, num_stages=4), pdl=True)


def _gemm1_rows(problem: LayerProblem, tokens: int) -> int:
    """Return the weight rows per gemm1 program, of both halves: 32, or 16 for twice as many programs.

    Every program quantizes its vector, so more rows are better, if they fill the GPU. int8 needs fewer programs for
    short vectors. With block scales, a small number of programs works best in full waves of the GPU: programs of 32
    rows take twice as long.
    """
    if problem.group_size == -1:
        fewest = 128 if problem.element == "int8" and problem.hidden_size < DEEP else RESIDENT
        return 32 if problem.top_k * steps_of(problem.width, 32) >= fewest else 16
    programs, twice = (tokens * problem.top_k * steps_of(problem.width, rows) for rows in (32, 16))
    fills = programs >= 2 * RESIDENT
    return 32 if fills or 2 * steps_of(programs, RESIDENT) <= steps_of(twice, RESIDENT) else 16


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


def mma_sync_plan(problem: LayerProblem, tokens: int) -> GemvPlan:
    """Return the plan for 4-bit words that `mma.sync` multiplies where it can; all four warps share long rows.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan.
    """
    if problem.capability != 90 or max(problem.hidden_size, problem.intermediate_size) > LONGEST:
        return words_plan(problem, tokens)
    finalize = problem.top_k == 1
    if problem.hidden_size <= 2048:
        config = GemvConfig(32, 64, 4, mma_sync=True)
        return GemvPlan(config, config, pdl=True, fuse_finalize=finalize)
    # Few programs: prefetch more of each row.
    ahead = 192 if tokens == 1 else 128
    gemm1, gemm2 = (GemvConfig(16, words, 4, mma_sync=True) for words in (128, ahead))
    return GemvPlan(gemm1, gemm2, pdl=True, fuse_finalize=finalize)


def words_plan(problem: LayerProblem, tokens: int) -> GemvPlan:
    """Return the plan for 16-bit activations and repacked weights.

    Args:
        problem: Layer properties that do not change between calls.
        tokens: Number of tokens of the call.

    Returns:
        The plan.
    """
    hidden, size, bits = problem.hidden_size, problem.intermediate_size, problem.bits
    gemm1 = _config(problem, problem.top_k * problem.width, tokens, steps_of(hidden) * 4 * bits, 16)
    gemm2 = _config(problem, problem.top_k * hidden, tokens, steps_of(size) * 4 * bits, 32)
    return GemvPlan(gemm1, gemm2, pdl=90 <= problem.capability < 120, fuse_finalize=problem.top_k == 1)


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
