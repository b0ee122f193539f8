"""Launch configurations of a layer without tensor cores, for tokens that share little of what is read of weights."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.gemm.heuristics.mixed_input import MAX_PARTS, RESIDENT
from moe_core.gemm.heuristics.problem import LayerProblem
from moe_core.gemm.heuristics.tiles import steps_of

#: by the bits of a code: tokens, and pairs for each expert that they reach, up to which tensor cores were measured
#: behind.  Without them every pair reads its expert's weights, with them every expert's are read once.
MOST_TOKENS, MOST_PAIRS = {4: 8, 8: 2}, {4: 1.5, 8: 1.04}


@dataclass(frozen=True)
class GemvConfig:
    """Launch parameters of a matrix times a vector: ``block_n`` rows, ``block_w`` words of each at a time."""

    block_n: int
    block_w: int
    num_warps: int


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
    # chosen at random: an expert is not among one token's with this probability
    missed = max(0.0, 1 - problem.top_k / problem.num_experts)
    shared = tokens > 1 and pairs > MOST_PAIRS[bits] * problem.num_experts * (1 - missed**tokens)
    if tokens > MOST_TOKENS[bits] or shared or pairs * hidden > MAX_PARTS:
        return None
    # what is best for one token is for the others too
    gemm1 = _config(problem.top_k * size * (2 if problem.gated else 1), steps_of(hidden) * 4 * bits, bits, 16)
    gemm2 = _config(problem.top_k * hidden, steps_of(size) * 4 * bits, bits, 32)
    return GemvPlan(gemm1, gemm2, 90 <= problem.capability < 120)


def _config(rows: int, words: int, bits: int, block_n: int) -> GemvConfig:
    """For ``rows`` of so many words; ``block_n`` of 8-bit codes, which are bound by memory, not by instructions."""
    if words <= 64:
        return GemvConfig(32, 32, 1 if bits == 4 else 4)
    if rows <= 16 * RESIDENT and words >= 256:
        # few programs: more of a row at a time
        return GemvConfig(16, 256, 4)
    if bits == 4:
        return GemvConfig(16, 256 if words >= 512 and words % 256 == 0 else 128, 2)
    return GemvConfig(block_n, 128, 4)
