"""The search for launch configurations, on a stand-in for a GPU whose times are a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from moe_core.kernels.gemm.heuristics import LayerProblem, gemv_plan, launch_plan
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan
from moe_core.kernels.tuning.candidates import neighbors
from moe_core.kernels.tuning.limits import Plan, own_plans, refusals, rounding
from moe_core.kernels.tuning.search import AHEAD, search

INT4 = LayerProblem("mixed_input", "int4", 128, 8, 2048, 768)
PROBLEMS = {
    "int4": INT4,
    "e4m3 blocks": LayerProblem("scaled_mm", "e4m3", 128, 8, 2048, 768, group_size=128),
    "e4m3": LayerProblem("scaled_mm", "e4m3", 8, 2, 4096, 14336),
    "e4m3 of float32": LayerProblem("scaled_mm", "e4m3", 8, 2, 4096, 14336, dtype_bytes=4),
    "int8": LayerProblem("scaled_mm", "int8", 8, 2, 4096, 14336),
    "e2m1 as e4m3": LayerProblem("scaled_mm", "e2m1", 32, 4, 2880, 2880),
    "as stored": LayerProblem("as_stored", "int4", 64, 6, 2048, 1408, group_size=128),
    "sm80": replace(INT4, capability=80),
    "sm120": replace(INT4, capability=120),
    "no NVIDIA GPU": LayerProblem("as_stored", "int4", 64, 6, 2048, 1408, capability=0),
}


class Formula:
    """Times calls by a formula, in no time but that of its own clock: a second for each."""

    def __init__(self, problem: LayerProblem, seconds: Callable[[int, Plan], float]) -> None:
        self.problem, self.formula, self.now = problem, seconds, 0.0
        self.broken: set[Plan] = set()
        self.asked: list[tuple[int, Plan]] = []
        self.prepared: set[tuple[int, Plan]] = set()

    def default(self, tokens: int) -> Plan:
        return gemv_plan(self.problem, tokens) or launch_plan(self.problem, tokens)

    def prepare(self, trials: Sequence[tuple[int, Plan]]) -> list[bool]:
        self.prepared.update(trials)
        return [plan not in self.broken for _, plan in trials]

    def seconds(self, tokens: int, plan: Plan) -> float:
        assert (tokens, plan) in self.prepared
        self.now += 1
        self.asked.append((tokens, plan))
        return self.formula(tokens, plan)


def warps_and_stages(tokens: int, plan: Plan) -> float:
    """Two steps from the built-in choice: eight warps and two stages for the first product."""
    if isinstance(plan, GemvPlan):
        return 1e-5
    return 1e-4 * (1 + (plan.gemm1.num_warps != 8)) * plan.gemm1.num_stages * tokens


def test_it_goes_from_better_to_better() -> None:
    rig = Formula(INT4, warps_and_stages)
    found = search(INT4, [64, 1, 512], rig, seconds=1000, clock=lambda: rig.now)
    assert [(one.first, one.last) for one in found] == [(1, 1), (2, 64), (65, 512)]
    assert found[0].plan == gemv_plan(INT4, 1)
    for one in found[1:]:
        assert isinstance(one.plan, TilePlan)
        assert (one.plan.gemm1.num_warps, one.plan.gemm1.num_stages) == (8, 1)
        assert one.best_us == pytest.approx(100 * one.last)
        assert one.default_us == pytest.approx(1e6 * warps_and_stages(one.last, rig.default(one.last)))


def test_the_time_is_kept_and_every_number_of_tokens_has_a_share() -> None:
    rig = Formula(INT4, warps_and_stages)
    counts = [4, 8, 16, 32, 64, 128, 256, 512]
    found = search(INT4, counts, rig, seconds=60, clock=lambda: rig.now)
    # beside the search itself: built-in ones before, and six times each of those that were beaten
    assert rig.now <= 60 + 6 * len(counts)
    tried = {tokens: sum(one == tokens for one, _ in rig.asked) for tokens in counts}
    assert min(tried.values()) >= 4
    assert len(found) == len(counts)


def test_what_scatters_is_no_gain() -> None:
    """A plan must be ahead by more than that, and again when both are timed side by side."""
    rig = Formula(INT4, lambda tokens, plan: 1e-4 if plan == rig.default(tokens) else 1e-4 * (1 - AHEAD / 2))
    assert search(INT4, [64], rig, seconds=40, clock=lambda: rig.now)[0].plan == rig.default(64)
    seen: set[Plan] = set()

    def lucky(tokens: int, plan: Plan) -> float:
        """The first time of a plan is short by chance."""
        again = plan in seen or plan == rig.default(tokens)
        seen.add(plan)
        return 1e-4 if again else 5e-5

    rig = Formula(INT4, lucky)
    one = search(INT4, [64], rig, seconds=40, clock=lambda: rig.now)[0]
    assert (one.plan, one.best_us) == (rig.default(64), one.default_us)


def test_what_fails_is_passed_over() -> None:
    rig = Formula(INT4, warps_and_stages)
    rig.broken = {plan for plan in neighbors(INT4, launch_plan(INT4, 64), 64, 64) if isinstance(plan, TilePlan)}
    one = search(INT4, [64], rig, seconds=400, clock=lambda: rig.now)[0]
    assert one.plan == launch_plan(INT4, 64)
    # all fail, the built-in one too
    rig = Formula(INT4, lambda tokens, plan: float("inf"))
    one = search(INT4, [64], rig, seconds=40, clock=lambda: rig.now)[0]
    assert (one.plan, one.default_us) == (launch_plan(INT4, 64), 0.0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_neighbors_are_possible_and_round_alike(name: str) -> None:
    problem = PROBLEMS[name]
    for tokens in (1, 16, 64, 300, 2000, 16384):
        default = launch_plan(problem, tokens)
        found = set(neighbors(problem, default, tokens, tokens))
        assert len(found) >= 5
        for plan in found:
            assert not refusals(problem, plan, tokens, tokens)
            if isinstance(plan, TilePlan):
                for gemm in ("gemm1", "gemm2"):
                    assert rounding(problem, getattr(plan, gemm)) == rounding(problem, getattr(default, gemm))


def test_kernels_that_round_otherwise_are_no_candidates() -> None:
    """Sums of e4m3 in the tensor cores hold fewer bits: as long as nobody asks, that is the heuristics' choice."""
    e4m3, blocks = PROBLEMS["e4m3"], PROBLEMS["e4m3 blocks"]
    assert any(plan.gemm1.warp_specialized for plan in own_plans(e4m3))

    def specialized(problem: LayerProblem, tokens: int) -> set[bool]:
        found = neighbors(problem, launch_plan(problem, tokens), tokens, tokens)
        return {plan.gemm1.warp_specialized for plan in found if isinstance(plan, TilePlan)}

    assert specialized(e4m3, 64) == {False}
    # the same sums in both kernels: block by block
    assert specialized(blocks, 640) == {False, True}


def test_the_warp_specialized_kernel_keeps_its_tiles() -> None:
    """Pairs are sorted into tiles for both products: those of one may be none that the other's kernel takes."""
    problem = PROBLEMS["e4m3 blocks"]
    plan = launch_plan(problem, 2000)
    assert plan.gemm1.warp_specialized
    other = replace(plan, gemm2=replace(plan.gemm2, block_m=256, warp_specialized=False))
    assert "gemm1: the warp-specialized kernel does not take tiles of 256 rows" in refusals(problem, other, 2000, 2000)
    assert all(
        found.block_m == plan.block_m
        for found in neighbors(problem, plan, 2000, 2000)
        if isinstance(found, TilePlan) and (found.gemm1.warp_specialized or found.gemm2.warp_specialized)
    )


def test_registers_go_with_the_tile() -> None:
    problem = replace(INT4, permuted=True)  # has no warp-specialized kernel
    plan = launch_plan(problem, 256)
    assert (plan.gemm2.block_m, plan.gemm2.max_registers) == (32, 168)
    found: dict[tuple[int, int], set[int]] = {}
    for other in neighbors(problem, plan, 256, 256):
        if isinstance(other, TilePlan):
            found.setdefault((other.gemm2.block_m, other.gemm2.num_warps), set()).add(other.gemm2.max_registers)
    assert found[32, 4] == {0, 168}
    # a step to another tile takes the limit of that tile
    assert found[16, 4] == {128}
    assert found[32, 8] == {0}
    for other_problem, registers in ((problem, 100), (replace(problem, capability=100), 168)):
        other = replace(plan, gemm2=replace(plan.gemm2, max_registers=registers))
        assert any("max_registers is" in reason for reason in refusals(other_problem, other, 256, 256))


def test_vectors_are_tried_with_and_without_finalize() -> None:
    """As many rows of each pair, and 16 at least of one by itself."""
    for problem, others in ((PROBLEMS["e4m3 blocks"], [False]), (PROBLEMS["int8"], [True])):
        plan = gemv_plan(problem, 1)
        assert plan is not None
        flipped = [
            other
            for other in neighbors(problem, plan, 1, 1)
            if isinstance(other, GemvPlan) and other.fuse_finalize != plan.fuse_finalize
        ]
        assert [other.fuse_finalize for other in flipped] == others
    # mixtral in int8: 16 rows of one pair, 32 of both; and back
    two = flipped[0]
    assert (two.gemm2.block_n, two.gemm2.num_warps) == (32, 4)
    assert plan in set(neighbors(problem, two, 1, 1))
