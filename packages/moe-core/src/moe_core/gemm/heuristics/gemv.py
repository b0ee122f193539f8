"""Launch configurations of a layer without tensor cores, for tokens that share little of what is read of weights."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.gemm.heuristics.mixed_input import MAX_PARTS, RESIDENT_4, takes_8_rows
from moe_core.gemm.heuristics.problem import LayerProblem
from moe_core.gemm.heuristics.tiles import steps_of

#: tokens up to which 8-bit and e2m1 weights were measured ahead of tensor cores, where they hardly share an expert
MOST_TOKENS = {"int8": 4, "e4m3": 2, "e2m1": 1}


@dataclass(frozen=True)
class GemvConfig:
    """Launch parameters of a matrix times a vector: ``block_n`` rows, ``block_w`` words of each at a time.

    ``mma_sync``: 4-bit words are multiplied by `mma.sync`, on a GPU: four warps have 64 rows, or share the columns of
    32 or 16, and ``block_w`` words of each row are requested ahead.
    """

    block_n: int
    block_w: int
    num_warps: int
    mma_sync: bool = False


@dataclass(frozen=True)
class GemvPlan:
    """The layer without tensor cores."""

    gemm1: GemvConfig
    gemm2: GemvConfig
    pdl: bool = False


def choose_gemv(problem: LayerProblem, tokens: int) -> GemvPlan | None:
    """The plan for one token, or a few that share few experts; None for more."""
    pairs, bits = tokens * problem.top_k, problem.bits
    hidden, size = problem.hidden_size, problem.intermediate_size
    if tokens > 1:
        # a pair reads its expert's weights; tiles read them once for each expert that is reached, by random choice.
        # In int4 a pair takes two thirds of the time of an expert's tile of 16 rows, which takes less the more there
        # are, and four fifths of that of one of 8 rows.
        int4 = 1.2 if takes_8_rows(problem) else 1.55 - tokens / 64
        most = {"int4": int4, "int8": 1.15}.get(problem.element, 1.04)
        if pairs > most * problem.reached(tokens) or tokens > MOST_TOKENS.get(problem.element, tokens):
            return None
    if pairs * hidden > MAX_PARTS:
        return None
    # what is best for one token is for the others too
    gemm1 = _config(problem, problem.top_k * size * (2 if problem.gated else 1), steps_of(hidden) * 4 * bits, 16)
    gemm2 = _config(problem, problem.top_k * hidden, steps_of(size) * 4 * bits, 32)
    return GemvPlan(gemm1, gemm2, 90 <= problem.capability < 120)


def _config(problem: LayerProblem, rows: int, words: int, block_n: int) -> GemvConfig:
    """For ``rows`` of so many words; ``block_n`` of 8-bit codes, which are bound by memory, not by instructions."""
    if words <= 64:
        return GemvConfig(32, 32, 1 if problem.bits == 4 else 4)
    if rows <= 16 * RESIDENT_4 and words >= 256:
        # few programs: more of a row at a time
        return GemvConfig(16, 256, 4)
    if problem.bits == 4:
        short = problem.element == "e2m1" and words <= 128
        return GemvConfig(16, 256 if words >= 512 and words % 256 == 0 else 128, 1 if short else 2)
    return GemvConfig(block_n, 128, 4)
