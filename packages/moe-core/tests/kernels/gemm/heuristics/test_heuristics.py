"""Launch heuristics, for any shape: what every launch relies on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from moe_core.kernels.gemm.heuristics import LayerProblem, gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.cost import BLOCK_N, MAX_PARTIALS, Loops, expected_tiles
from moe_core.kernels.gemm.heuristics.problem import balance_of
from moe_core.kernels.gemm.plan import GemvConfig, TilePlan
from moe_core.kernels.tuning.limits import refusals
from moe_core.spec.device import DeviceInfo

SHAPES = (
    (8, 2, 4096, 14336),
    (256, 8, 7168, 256),
    (128, 4, 2880, 2880),
    (128, 6, 2688, 1856),
    (1, 1, 7168, 6016),
    # as many partial sums as there is room for
    (1, 1, 32768, 6016),
    (3, 1, 33, 65),
)
TOKENS = (1, 7, 12, 24, 64, 300, 512, 768, 1500, 5000, 40000)
CAPABILITIES = (0, 80, 89, 90, 100, 120)

#: every family and element type, with what its callers ask for
KINDS: dict[str, dict[str, Any]] = {
    "e4m3": {"family": "scaled_mm", "element": "e4m3"},
    "e4m3 of float32": {"family": "scaled_mm", "element": "e4m3", "dtype_bytes": 4},
    "e4m3 blocks": {"family": "scaled_mm", "element": "e4m3", "group_size": 64},
    "int8 plain": {"family": "scaled_mm", "element": "int8", "gated": False},
    "int4 as int8": {"family": "scaled_mm", "element": "int4"},
    "int4 groups as int8": {"family": "scaled_mm", "element": "int4", "group_size": 128},
    "e2m1 as e4m3": {"family": "scaled_mm", "element": "e2m1"},
    "e2m1 as e4m3 static": {"family": "scaled_mm", "element": "e2m1", "quantizes_h": True},
    "e2m1 as e4m3 plain": {"family": "scaled_mm", "element": "e2m1", "gated": False},
    "mixed int4": {"family": "mixed_input", "element": "int4"},
    "mixed int8": {"family": "mixed_input", "element": "int8"},
    "mixed int8 plain": {"family": "mixed_input", "element": "int8", "gated": False},
    "mixed e2m1": {"family": "mixed_input", "element": "e2m1"},
    "mixed float32": {"family": "mixed_input", "element": "int8", "dtype_bytes": 4},
    "as_stored": {"family": "as_stored", "element": "int4"},
    "as stored groups": {"family": "as_stored", "element": "int8", "group_size": 32},
    "as stored permuted": {"family": "as_stored", "element": "int4", "group_size": 128, "permuted": True},
    "as stored float32": {"family": "as_stored", "element": "int4", "dtype_bytes": 4},
    "as stored e2m1": {"family": "as_stored", "element": "e2m1"},
    "as stored e2m1 blocks": {"family": "as_stored", "element": "e2m1", "group_size": 128},
}


def problem_of(kind: str, shape: tuple[int, int, int, int] = SHAPES[0], **changes: Any) -> LayerProblem:
    experts, top_k, hidden, size = shape
    given = KINDS[kind] | changes
    return LayerProblem(num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=size, **given)


def plan_of(kind: str, tokens: int, *shape: int, **changes: Any) -> TilePlan:
    """``shape``: top-k, experts, hidden size, intermediate size."""
    top_k, experts, hidden, size = shape
    return launch_plan(problem_of(kind, (experts, top_k, hidden, size), **changes), tokens)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_hold_together(kind: str, shape: tuple[int, int, int, int]) -> None:
    for capability in CAPABILITIES:
        problem = problem_of(kind, shape, capability=capability)
        depth = problem.group_size if kind == "e4m3 blocks" else 128
        unsplit = problem_of(kind, shape, capability=capability, may_split=False)
        for tokens in TOKENS:
            plan, pairs = launch_plan(problem, tokens), tokens * problem.top_k
            width = problem.intermediate_size * (2 if problem.gated else 1)
            for config, columns, rows in (
                (plan.gemm1, problem.hidden_size, width),
                (plan.gemm2, problem.intermediate_size, problem.hidden_size),
            ):
                assert plan.block_m % config.block_m == 0
                # partial sums have room, and none is without a step
                assert config.split_k == 1 or pairs * config.split_k * rows <= MAX_PARTIALS
                assert config.split_k <= max(-(-columns // depth), 1)
                # neither dependent launches nor descriptors before sm_90
                assert capability >= 90 or not (plan.pdl or config.tma)
                # weights that are decoded in registers are rows of the product
                assert config.swap_ab or (problem.family == "scaled_mm" and problem.bits == 8)
            # an epilogue that quantizes fills h up to whole 128 columns
            assert plan.gemm1.block_n == BLOCK_N or not problem.quantizes_h
            # h has room for whole tiles of 128
            if not problem.gated:
                assert -(-problem.intermediate_size // BLOCK_N) * BLOCK_N % plan.gemm1.block_n == 0
            assert not refusals(problem, plan, tokens, tokens)
            without = launch_plan(unsplit, tokens)
            assert (without.gemm1.split_k, without.gemm2.split_k) == (1, 1)


@pytest.mark.parametrize("size", [65, 768, 1856, 2048])
def test_tiles_without_halves_end_where_the_room_for_h_does(size: int) -> None:
    for tokens in (1, 600, 1200, 4000, 40000):
        plan = plan_of("mixed int8 plain", tokens, 8, 256, 2048, size)
        assert -(-size // BLOCK_N) * BLOCK_N % plan.gemm1.block_n == 0


@pytest.mark.parametrize("kind", ["mixed float32", "as stored float32"])
def test_float32_has_small_tiles(kind: str) -> None:
    for capability in (80, 90, 100):
        for tokens in (1, 600, 40000):
            plan = plan_of(kind, tokens, 8, 256, 2048, 768, capability=capability)
            assert plan.gemm1 == plan.gemm2
            assert (plan.gemm1.block_m, plan.gemm1.block_n, plan.gemm1.split_k) == (16, BLOCK_N, 1)


def test_products_of_a_step_have_room_in_registers() -> None:
    """Beside them there is no room for two accumulators of 128 x 128."""
    for tokens in TOKENS:
        for kind in ("as stored groups", "int4 groups as int8"):
            assert plan_of(kind, tokens, 2, 8, 4096, 14336).gemm1.block_m <= 64


@pytest.mark.parametrize("kind", ["e2m1 as e4m3", "e2m1 as e4m3 static", "e2m1 as e4m3 plain"])
def test_adapters_of_e2m1_have_room_beside_the_sums_of_two_halves_on_sm_100(kind: str) -> None:
    for tokens in (1000, 8000):
        shape = (tokens, 4, 128, 2880, 2880)
        assert plan_of(kind, *shape, lora=True) == plan_of(kind, *shape)
        plan, without = (plan_of(kind, *shape, lora=lora, capability=100) for lora in (True, False))
        assert plan.gemm1.num_warps == 8 or not problem_of(kind).gated
        assert replace(plan.gemm1, num_warps=without.gemm1.num_warps) == without.gemm1
        assert plan.gemm2 == without.gemm2


@pytest.mark.parametrize("kind", ["e4m3", "int4 as int8", "e2m1 as e4m3", "mixed int4", "mixed e2m1", "as_stored"])
def test_rows_of_a_tile_grow_with_the_rows_of_an_expert(kind: str) -> None:
    rows = [plan_of(kind, tokens, 4, 128, 2880, 2880).gemm1.block_m for tokens in (1, 128, 512, 1024, 2000, 8000)]
    assert rows == sorted(rows)
    assert rows[0] == (8 if kind in ("mixed int4", "mixed e2m1") else 16)
    assert rows[-1] == 128


@pytest.mark.parametrize("kind", ["mixed int4", "mixed e2m1", "mixed int8", "mixed float32"])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_tiles_of_8_rows_are_for_few_rows_of_4_bits(kind: str, capability: int, batch_invariant: bool) -> None:
    takes = kind in ("mixed int4", "mixed e2m1") and capability == 90 and not batch_invariant
    given = {"capability": capability, "batch_invariant": batch_invariant, "may_split": not batch_invariant}
    for shape in SHAPES:
        problem = problem_of(kind, shape, **given)
        for tokens in range(1, 200):
            rows = problem.rows_per_expert(tokens)
            # gemm1 may have 16 for a fuller last round
            height = launch_plan(problem, tokens).gemm2.block_m
            assert (height == 8) == (takes and expected_tiles(problem, tokens, 8) <= 1.15)
            assert height != 8 or rows <= 8
            assert height == 8 or not takes or rows > 4


def test_parts_of_tiles_of_8_rows_fill_the_multiprocessors() -> None:
    # a last round that is nearly empty costs more than sums of parts do, unless those are many
    assert plan_of("mixed int4", 64, 8, 256, 7168, 256).gemm1.split_k == 4
    assert plan_of("mixed int4", 12, 8, 32, 7168, 2048).gemm1.split_k == 4
    assert plan_of("mixed int4", 16, 8, 128, 2048, 768).gemm1.split_k == 2
    assert plan_of("mixed int4", 32, 8, 128, 2048, 768).gemm1.split_k == 1
    assert plan_of("mixed e2m1", 4, 4, 32, 2880, 2880).gemm1.split_k == 1
    # gemm2: 175, 253 and 451 tiles, of 660 programs that run at a time
    assert plan_of("mixed int4", 4, 2, 8, 4096, 14336).gemm2.split_k == 2
    assert plan_of("mixed int4", 16, 2, 8, 4096, 14336).gemm2.split_k == 2
    assert plan_of("mixed int4", 16, 2, 16, 4096, 6400).gemm2.split_k == 1
    # 649 and 661: two whole rounds instead; 1,612 of short loops
    assert plan_of("mixed e2m1", 16, 4, 32, 2880, 2880).gemm2.split_k == 2
    assert plan_of("mixed e2m1", 8, 4, 128, 2880, 2880).gemm2.split_k == 2
    assert plan_of("mixed int4", 8, 8, 32, 7168, 2048).gemm2.split_k == 1
    # 337 in two parts are one round and a few programs: four rounds instead
    assert plan_of("mixed int4", 8, 2, 16, 4096, 6400).gemm2.split_k == 8


@pytest.mark.parametrize(
    ("kind", "tokens", "shape", "gemm1"),
    [
        # 2.2 rounds of tiles of 8 rows, or 3.1 of parts, are 2.7 and 1.9 of whole tiles of 16
        ("mixed e2m1", 32, (4, 32, 2880, 2880), (16, 1)),
        ("mixed int4", 24, (8, 32, 7168, 2048), (16, 1)),
        ("mixed int4", 64, (1, 16, 5120, 4096), (16, 1)),
        ("mixed int4", 128, (8, 256, 7168, 256), (16, 1)),
        # 3.2 rounds, or one; 2.2 of short loops; 1.9
        ("mixed int4", 20, (8, 384, 7168, 256), (8, 4)),
        ("mixed int4", 48, (8, 128, 2048, 768), (8, 1)),
        ("mixed e2m1", 16, (4, 32, 2880, 2880), (8, 1)),
    ],
)
def test_gemm1_has_16_rows_where_the_last_round_of_8_is_nearly_empty(
    kind: str, tokens: int, shape: tuple[int, int, int, int], gemm1: tuple[int, int]
) -> None:
    plan = plan_of(kind, tokens, *shape)
    assert (plan.gemm1.block_m, plan.gemm1.split_k) == gemm1
    assert plan.gemm2.block_m == 8


def test_short_loops_of_int4_need_two_warps() -> None:
    assert plan_of("mixed int4", 64, 8, 256, 7168, 256).gemm2.num_warps == 2
    assert plan_of("mixed int4", 64, 8, 128, 2048, 384).gemm2.num_warps == 4
    assert plan_of("mixed e2m1", 64, 8, 256, 7168, 256).gemm2.num_warps == 4


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ((2, 8, 4096, 14336), 640, (True, False)),
        ((8, 128, 2048, 768), 2560, (True, True)),
        ((8, 128, 2048, 768), 8192, (True, False)),
        ((8, 32, 7168, 2048), 640, (True, True)),
        ((8, 32, 7168, 2048), 384, (False, True)),
        ((8, 256, 7168, 256), 5120, (False, True)),
    ],
)
def test_short_tiles_are_for_short_loops_with_scales_along_k(
    shape: tuple[int, int, int, int], tokens: int, expected: tuple[bool, bool]
) -> None:
    for kind, wanted in (("e4m3 blocks", expected), ("e4m3", (False, False))):
        plan = plan_of(kind, tokens, *shape)
        assert plan.gemm1.warp_specialized
        assert plan.gemm2.warp_specialized
        assert (plan.gemm1.short_tiles, plan.gemm2.short_tiles) == wanted


@pytest.mark.parametrize(
    ("shape", "balance", "short"),
    [
        ((2, 8, 4096, 14336), 172, {160: (False, False), 192: (True, False)}),
        ((8, 128, 2048, 768), 172, {96: (False, False), 160: (False, False), 192: (True, True)}),
        ((8, 128, 2048, 768), 117, {96: (False, True), 128: (True, True)}),
        # loops of few steps, by which an H200 gains, and an H100 does not lose
        ((8, 256, 7168, 512), 172, {96: (False, True), 192: (False, True)}),
    ],
)
def test_short_tiles_are_for_gpus_that_wait_for_products(
    shape: tuple[int, int, int, int], balance: int, short: dict[int, tuple[bool, bool]]
) -> None:
    top_k, experts, *sizes = shape
    problem = problem_of("e4m3 blocks", (experts, top_k, *sizes), balance=balance)
    for rows, expected in short.items():
        plan = launch_plan(problem, rows * experts // top_k)
        assert (plan.gemm1.short_tiles, plan.gemm2.short_tiles) == expected


def test_how_many_rows_products_take_as_long_as_reading() -> None:
    for card, expected in (
        ("h100", 172),
        ("h200", 117),
        ("h20", 84),
        ("gh200", 143),
        ("sm90", 117),
        ("a100", 117),
        ("cpu", 117),
    ):
        assert balance_of(DeviceInfo.parse(card)) == expected


@pytest.mark.parametrize(("kind", "expected"), [("e4m3 blocks", (1, 1)), ("e4m3", (1, 1)), ("int8 plain", (1, 1))])
def test_small_experts_stay_in_l2_for_their_second_tile(kind: str, expected: tuple[int, int]) -> None:
    for shape, wanted in (
        ((8, 128, 4096, 1408), expected),
        ((8, 32, 7168, 2048), expected),
        ((2, 8, 4096, 14336), (8, 8)),
    ):
        plan = plan_of(kind, 160 * shape[1] // shape[0], *shape)
        assert (plan.gemm1.group_m, plan.gemm2.group_m) == wanted


@pytest.mark.parametrize(
    ("shape", "short", "most"),
    [
        ((2, 8, 4096, 14336), False, 48),
        ((8, 256, 7168, 256), True, 128),
        ((8, 256, 7168, 512), True, 64),
        ((8, 128, 4096, 768), True, 48),
    ],
)
def test_gemm1_keeps_tiles_of_64_rows_where_128_would_be_half_empty(
    shape: tuple[int, int, int, int], short: bool, most: int
) -> None:
    top_k, experts = shape[:2]
    for kind, wanted in (("e4m3 blocks", short), ("e4m3", False), ("int8 plain", False)):
        for rows, alone in ((24, None), (32, True), (most, True), (most + 16, False)):
            plan = plan_of(kind, rows * experts // top_k, *shape)
            assert plan.gemm1.warp_specialized == (alone is False)
            assert plan.gemm2.warp_specialized == (alone is not None)
            if alone:
                assert plan.gemm1.block_m == 64
                assert plan.gemm2.short_tiles == wanted


@pytest.mark.parametrize(
    ("group_size", "hidden", "inner", "stages"),
    [(128, 4096, 6400, (5, 5)), (-1, 4096, 6400, (4, 4)), (128, 7168, 2048, (5, 3)), (-1, 2048, 768, (3, 3))],
)
def test_long_loops_have_more_steps_in_flight(
    group_size: int, hidden: int, inner: int, stages: tuple[int, int]
) -> None:
    plan = plan_of("e4m3", 128, 2, 16, hidden, inner, group_size=group_size)
    assert plan.block_m == 32
    assert (plan.gemm1.num_stages, plan.gemm2.num_stages) == stages


def test_4_bit_words_beside_12_to_128_rows() -> None:
    # a second tile of 16 rows costs more than rows that are not there
    for tokens, rows in ((384, 16), (448, 16), (512, 64), (768, 64), (1792, 64), (2048, 128), (4096, 128)):
        plan = plan_of("mixed int4", tokens, 8, 256, 7168, 256)
        assert (plan.gemm1.block_m, plan.gemm2.block_m) == (rows, rows)
        # tiles side by side have the same rows of activations
        assert (plan.gemm1.warp_specialized, plan.gemm1.group_m == 1) == (rows > 16,) + (rows > 16 or tokens == 384,)
    # e2m1 takes more instructions to dequantize
    for tokens, rows in ((512, 32), (896, 32), (1024, 64)):
        plan = plan_of("mixed e2m1", tokens, 4, 128, 2880, 2880)
        assert (plan.gemm1.block_m, plan.gemm2.block_m) == (rows, rows)
        assert plan.gemm1.warp_specialized == (rows == 64)
    # columns in another order have no warp-specialized kernel, nor have LoRA deltas
    for changes in ({"permuted": True}, {"lora": True}):
        plan = plan_of("mixed int4", 384, 8, 128, 2048, 768, **changes)
        assert (plan.gemm1.block_m, plan.gemm1.warp_specialized) == (32, False)
    # where the compiler leaves tiles of 16 rows as they are, a second one is the cheaper for longer
    assert plan_of("mixed int4", 512, 8, 256, 7168, 256, capability=100).gemm2.block_m == 16
    assert plan_of("mixed int4", 768, 8, 256, 7168, 256, may_split=False, batch_invariant=True).gemm2.block_m == 32


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "registers"),
    [
        # rows per expert 8: 512 programs of gemm2 are one round of four for each multiprocessor, and two of three
        ("mixed int4", (16, 2, 4096, 6400), 64, (128, 128)),
        # 24: 261 programs are one round of two
        ("mixed e2m1", (8, 2, 4096, 14336), 96, (168, 0)),
        # 16: 512 programs are two rounds, of two or of three
        ("mixed e2m1", (16, 2, 4096, 6400), 128, (168, 0)),
        ("mixed e2m1", (128, 8, 4096, 1408), 384, (168, 168)),
        ("mixed e2m1", (32, 4, 2880, 2880), 192, (168, 168)),
        # for it there is the warp-specialized kernel
        ("mixed int4", (128, 8, 4096, 1408), 384, (0, 0)),
        # tiles of 8 rows, and those of e2m1 with 16, take few
        ("mixed int4", (128, 8, 4096, 1408), 64, (0, 0)),
        ("mixed e2m1", (128, 4, 2880, 2880), 256, (0, 0)),
        ("mixed int8", (128, 8, 2048, 768), 128, (0, 0)),
    ],
)
def test_registers_leave_room_for_one_program_more(
    kind: str, shape: tuple[int, int, int, int], tokens: int, registers: tuple[int, int]
) -> None:
    experts, top_k, hidden, inner = shape
    plan = plan_of(kind, tokens, top_k, experts, hidden, inner)
    assert (plan.gemm1.max_registers, plan.gemm2.max_registers) == registers
    for others in ({"capability": 100}, {"batch_invariant": True, "may_split": False}, {"dtype_bytes": 4}):
        plan = plan_of(kind, tokens, top_k, experts, hidden, inner, **others)
        assert (plan.gemm1.max_registers, plan.gemm2.max_registers) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        *((kind, 4096) for kind in ("e4m3", "e4m3 blocks", "int8 plain", "mixed int4", "mixed e2m1", "as_stored")),
        # of few programs that come early, multiprocessors get uneven numbers
        ("int4 groups as int8", 8),
    ],
)
def test_launches_overlap_up_to_some_rows_per_expert(kind: str, last: int) -> None:
    for capability in (90, 100, 120):
        for tokens, overlaps in ((1, True), (last, True), (last + 1, False)):
            assert plan_of(kind, tokens, 8, 256, 7168, 256, capability=capability).pdl == overlaps
    assert not plan_of(kind, 1, 8, 256, 7168, 256, capability=80).pdl


def test_launches_that_make_e4m3_of_e2m1_do_not_overlap() -> None:
    assert not plan_of("e2m1 as e4m3", 1, 8, 256, 7168, 256).pdl


def test_few_tiles_share_loops() -> None:
    assert plan_of("mixed int4", 1, 8, 256, 7168, 256).gemm1.split_k == 8
    assert plan_of("mixed int4", 1, 2, 8, 4096, 14336).gemm1.split_k == 4
    assert plan_of("mixed int4", 32, 8, 128, 2048, 768).gemm1.split_k == 1
    plan = plan_of("mixed e2m1", 1, 4, 128, 2880, 2880)
    assert (plan.gemm1.split_k, plan.gemm2.split_k) == (2, 4)
    assert plan_of("e2m1 as e4m3", 1, 4, 128, 2880, 2880).gemm1.split_k == 4


def test_one_of_the_limits_of_a_split_must_hold() -> None:
    assert Loops(10, 56, 0, 0).split((132, 4)) == 8
    # too few steps for more, unless a part may have fewer
    assert Loops(10, 16, 0, 0).split((132, 4)) == 4
    assert Loops(10, 16, 0, 0).split((132, 4), (100, 2)) == 8
    assert Loops(10, 16, 0, 0).split((132, 4), (100, 2), most=3) == 2
    assert Loops(100, 56, 0, 0).split((132, 4)) == 1
    # room for partial sums of two splits
    assert Loops(10, 56, 0, MAX_PARTIALS // 3).split((132, 4)) == 2


@pytest.mark.parametrize("kind", ["mixed int4", "mixed int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_token_needs_no_tensor_cores(shape: tuple[int, int, int, int], kind: str) -> None:
    plan = gemv_plan(problem_of(kind, shape), 1)
    assert plan is not None
    assert not refusals(problem_of(kind, shape), plan, 1, 1)
    for config in (plan.gemm1, plan.gemm2):
        # turns of gate and up rows stay whole; a thread has four words
        assert config.block_n % 16 == 0
        assert config.block_n * config.block_w >= 4 * 32 * config.num_warps
    assert gemv_plan(problem_of(kind, shape, capability=80), 1) is not None


@pytest.mark.parametrize(
    ("kind", "shape", "most"),
    [
        # 6 pairs for 4.6 experts of 88 MB
        ("mixed int4", (8, 2, 4096, 14336), 2),
        ("mixed int4", (32, 8, 7168, 2048), 2),
        ("mixed int4", (32, 4, 2880, 2880), 5),
        ("mixed int4", (128, 8, 4096, 1408), 6),
        # small experts, or one pair of a token
        ("mixed int4", (128, 8, 2048, 768), 12),
        ("mixed int4", (16, 1, 5120, 4096), 9),
        ("mixed int4", (256, 8, 7168, 256), 12),
        # by `mma.sync` a pair takes as long as a tile of 8 rows, without sort and split-K
        ("mixed e2m1", (128, 4, 2880, 2880), 4),
        ("mixed e2m1", (8, 4, 2880, 2880), 1),
        ("mixed int4", (1, 1, 2048, 768), 12),
        # as many experts for a token as there are here
        ("mixed int4", (4, 8, 2048, 768), 3),
        ("mixed int8", (256, 8, 7168, 256), 12),
        ("mixed int8", (128, 8, 2048, 768), 10),
        ("mixed int8", (128, 8, 4096, 1408), 6),
        ("mixed int8", (32, 8, 7168, 2048), 2),
        ("mixed int8", (8, 2, 4096, 14336), 2),
    ],
)
def test_tokens_that_share_experts_take_tiles(kind: str, shape: tuple[int, int, int, int], most: int) -> None:
    problem = problem_of(kind, shape)
    for tokens in range(1, 20):
        plan = gemv_plan(problem, tokens)
        assert (plan is not None) == (tokens <= most)
        assert plan is None or not refusals(problem, plan, tokens, tokens)


@pytest.mark.parametrize(
    ("shape", "gemm1", "gemm2"),
    [
        # rows of all pairs; words of a program's rows, and its warps, for 1, 2, 4 and 8 tokens
        ((128, 8, 2048, 768), [(128, 2), (64, 1), (32, 1), (64, 1)], [(128, 2), (64, 1), (32, 1), (32, 1)]),
        ((256, 8, 7168, 256), [(256, 4), (256, 4), (128, 2), (64, 1)], [(32, 1)] * 4),
        ((16, 1, 5120, 4096), [(256, 4), (128, 2), (64, 1), (32, 1)], [(256, 4), (128, 2), (64, 1), (32, 1)]),
    ],
)
def test_words_of_a_row_are_shared_by_as_few_warps_as_fill_the_gpu(
    shape: tuple[int, int, int, int], gemm1: list[tuple[int, int]], gemm2: list[tuple[int, int]]
) -> None:
    plans = [gemv_plan(problem_of("mixed int4", shape), tokens) for tokens in (1, 2, 4, 8)]
    assert [(plan.gemm1.block_w, plan.gemm1.num_warps) for plan in plans if plan is not None] == gemm1
    assert [(plan.gemm2.block_w, plan.gemm2.num_warps) for plan in plans if plan is not None] == gemm2


@pytest.mark.parametrize(
    ("kind", "shape", "most"),
    [
        ("int8 plain", (128, 8, 2048, 768), 12),
        ("int8 plain", (256, 8, 7168, 256), 12),
        ("int8 plain", (16, 2, 4096, 6400), 5),
        ("int8 plain", (8, 2, 4096, 14336), 2),
        ("e4m3", (128, 8, 2048, 768), 8),
        ("e4m3 blocks", (128, 8, 2048, 768), 5),
        ("e4m3 blocks", (128, 8, 4096, 1408), 3),
        ("e4m3 blocks", (32, 8, 7168, 2048), 1),
        ("e4m3", (8, 2, 4096, 14336), 1),
    ],
)
def test_few_tokens_of_8_bit_weights_take_vectors(kind: str, shape: tuple[int, int, int, int], most: int) -> None:
    problem = problem_of(kind, shape)
    one = gemv_plan(problem, 1)
    for tokens in range(1, 20):
        plan = gemv_plan(problem, tokens)
        assert (plan is not None) == (tokens <= most)
        if plan is not None:
            assert one is not None
            # scales of blocks: rows by rounds of the GPU
            assert kind == "e4m3 blocks" or replace(plan.gemm1, along_m=False) == one.gemm1
            assert not refusals(problem, plan, tokens, tokens)
    if one is not None:
        assert not refusals(problem, one, 1, most)
        wide, long = replace(one.gemm1, block_n=128), replace(one.gemm2, block_w=256)
        assert "gemm1: block_n is 128" in refusals(problem, replace(one, gemm1=wide), 1, 1)[0]
        assert "gemm2: block_w is 256" in refusals(problem, replace(one, gemm2=long), 1, 1)[0]
    experts, top_k, hidden, size = shape
    for other in ({"capability": 80}, {"may_split": False}, {"batch_invariant": True}):
        assert gemv_plan(problem_of(kind, shape, **other), 1) is None
    for sizes in ((hidden + 8, size), (hidden, size + 8), (131072, size), (hidden, 131072)):
        assert gemv_plan(problem_of(kind, (experts, top_k, *sizes)), 1) is None


@pytest.mark.parametrize(
    ("kind", "shape", "most"),
    [
        # one pair of a token is nothing to add up
        ("e4m3 blocks", (16, 1, 5120, 4096), 3),
        ("int8 plain", (16, 1, 5120, 4096), 4),
        # int8: little work to quantize a vector again
        ("int8 plain", (256, 8, 7168, 256), 4),
        ("int8 plain", (128, 8, 4096, 1408), 4),
        ("int8 plain", (32, 8, 7168, 2048), 0),
        # e4m3: 256 columns are little too
        ("e4m3 blocks", (256, 8, 7168, 256), 4),
        ("e4m3", (256, 8, 7168, 256), 4),
        # e4m3: 256 programs, which fit at a time
        ("e4m3 blocks", (128, 8, 2048, 768), 1),
        ("e4m3", (128, 8, 2048, 768), 1),
        ("e4m3", (128, 8, 2048, 1408), 0),
        ("e4m3", (128, 8, 4096, 768), 0),
        # warps are shared out evenly
        ("int8 plain", (64, 6, 2048, 1408), 0),
    ],
)
def test_pairs_are_added_up_at_the_end_of_gemm2(kind: str, shape: tuple[int, int, int, int], most: int) -> None:
    problem, fused = problem_of(kind, shape), []
    for tokens in range(1, 5):
        plan = gemv_plan(problem, tokens)
        if plan is not None and plan.fuse_finalize:
            fused.append(tokens)
            # every warp has whole rows of one pair
            assert plan.gemm2.num_warps % shape[1] == 0
            lanes = plan.gemm2.block_w // 4
            assert plan.gemm2.block_n % (32 // lanes * plan.gemm2.num_warps) == 0
            assert not refusals(problem, plan, tokens, tokens)
            few = replace(plan, gemm2=replace(plan.gemm2, num_warps=shape[1] // 2))
            assert shape[1] == 1 or f"got {shape[1]}" in "".join(refusals(problem, few, tokens, tokens))
    assert fused == list(range(1, most + 1))


@pytest.mark.parametrize(
    ("kind", "shape", "first"),
    [
        # megabytes that pairs read again with so many tokens, and with one less: 22 and 15, 20 and 13, 22 and 16
        ("int8 plain", (128, 8, 2048, 768), 6),
        ("mixed int4", (128, 8, 2048, 768), 7),
        ("mixed int4", (128, 8, 4096, 1408), 4),
        # a quarter of an expert of 176 MB
        ("int8 plain", (8, 2, 4096, 14336), 2),
    ],
)
def test_pairs_that_share_weights_run_side_by_side(kind: str, shape: tuple[int, int, int, int], first: int) -> None:
    plans = [gemv_plan(problem_of(kind, shape), tokens) for tokens in range(1, 13)]
    found = [{plan.gemm1.along_m, plan.gemm2.along_m} for plan in plans if plan is not None]
    assert len(found) >= first
    assert found == [{tokens >= first} for tokens in range(1, len(found) + 1)]


@pytest.mark.parametrize(
    ("kind", "shape", "rows"),
    [
        # programs of 16 rows: 128, 256, 384 and 512, beside twice as many of 8, in rounds of 264
        ("e4m3 blocks", (256, 8, 7168, 256), [8, 16, 8, 16]),
        ("e4m3 blocks", (128, 8, 2048, 768), [8, 16, 16, 16]),
        ("e4m3 blocks", (16, 1, 5120, 4096), [16, 16, 16]),
        # whatever the number of tokens
        ("e4m3", (256, 8, 7168, 256), [8, 8, 8, 8]),
        ("e4m3", (128, 8, 2048, 768), [16, 16, 16, 16]),
        ("int8 plain", (16, 1, 5120, 4096), [8, 8, 8, 8]),
    ],
)
def test_few_programs_of_gemm1_fill_the_gpu(kind: str, shape: tuple[int, int, int, int], rows: list[int]) -> None:
    plans = [gemv_plan(problem_of(kind, shape), tokens) for tokens in range(1, 5)]
    assert [plan.gemm1.block_n // 2 for plan in plans if plan is not None] == rows


def test_one_pair_of_a_token_needs_no_finalize_for_words_either() -> None:
    for kind, shape in (("mixed int4", (16, 1, 5120, 4096)), ("mixed e2m1", (128, 1, 2880, 2880))):
        problem = problem_of(kind, shape)
        plan = gemv_plan(problem, 1)
        assert plan is not None
        assert plan.fuse_finalize
        assert not refusals(problem, plan, 1, 1)
        two = problem_of(kind, (16, 2, *shape[2:]))
        assert refusals(two, plan, 1, 1) == ["fuse_finalize needs 1 pair per token in the GEMV kernel, got 2"]


def test_rows_of_other_ranks_share_more_than_they_seem_to() -> None:
    """Rows that were sent here have an expert here each: beyond four, vectors are for hardly any shared expert."""
    shape = (128, 8, 2048, 768)
    for kind, most in (("int8 plain", 6), ("e4m3 blocks", 5), ("mixed int4", 6), ("mixed int8", 6)):
        problem = problem_of(kind, shape, sharded=True)
        assert [tokens for tokens in range(1, 20) if gemv_plan(problem, tokens)] == list(range(1, most + 1))
    # 8 pairs for 6.6 experts
    large = problem_of("mixed int4", (16, 2, 4096, 6400), sharded=True)
    assert gemv_plan(large, 4) is not None


def test_rows_of_h_have_room_for_a_program_of_words() -> None:
    plan = gemv_plan(problem_of("mixed int4", (128, 8, 2048, 1408)), 1)
    assert plan is not None
    wide = replace(plan, gemm1=GemvConfig(256, 32, 4))
    assert not refusals(problem_of("mixed int4", (128, 8, 2048, 1408)), wide, 1, 1)
    plain = problem_of("mixed int4", (128, 8, 2048, 1408), gated=False)
    assert refusals(plain, wide, 1, 1) == ["gemm1: block_n is 256, expected at most 128, the padding of the rows of h"]


def test_vectors_of_all_pairs_of_a_token_have_room() -> None:
    problem = problem_of("e4m3 blocks", (128, 8, 2048, 16384))
    plan = gemv_plan(problem, 1)
    assert plan is not None
    fused = replace(plan, gemm2=GemvConfig(64, 64, 8, num_stages=2), fuse_finalize=True)
    assert refusals(problem, fused, 1, 1) == [
        "fuse_finalize: vectors of 8 pairs take 262144 bytes of shared memory, expected at most 131072"
    ]
    narrow = replace(plan, gemm2=replace(plan.gemm2, block_n=8))
    assert "gemm2: block_n is 8, expected at least 16 rows per program" in refusals(problem, narrow, 1, 1)


def test_a_plan_between_the_numbers_of_tokens_that_are_asked_is_one_of_the_layer() -> None:
    problem = problem_of("e4m3 blocks", (8, 2, 1024, 512), group_size=128, balance=84)
    for tokens in (264, 300, 352):
        assert not refusals(problem, launch_plan(problem, tokens), tokens, tokens)


@pytest.mark.parametrize(("shape", "most"), [((8, 2, 4096, 14336), 4), ((128, 8, 2048, 768), 12)])
def test_tiles_of_16_rows_leave_more_tokens_to_vectors(shape: tuple[int, int, int, int], most: int) -> None:
    found = [gemv_plan(problem_of("mixed int4", shape, capability=80), tokens) for tokens in (most, most + 1)]
    assert [plan is None for plan in found] == [False, True]


@pytest.mark.parametrize("size", [16384, 16512])
def test_vectors_beside_e2m1_have_room_in_shared_memory(size: int) -> None:
    for shape in ((8, 2, 2048, size), (8, 2, size, 2048)):
        plan = gemv_plan(problem_of("mixed e2m1", shape), 1)
        assert plan is not None
        assert (plan.gemm1.mma_sync, plan.gemm2.mma_sync) == (size <= 16384,) * 2
        if size > 16384:
            continue
        for config, columns in ((plan.gemm1, shape[2]), (plan.gemm2, shape[3])):
            # [8, 128] numbers of 16 bits for each step of 128 columns of each part
            assert -(-columns // (128 * 64 // config.block_n)) * 8 * 128 * 2 <= 200 * 1024


def test_partial_sums_have_room() -> None:
    assert gemv_plan(problem_of("mixed int4", (256, 64, MAX_PARTIALS // 64 + 1, 256)), 1) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_bits_depend_on_is_the_same_for_all_tokens(kind: str) -> None:
    for capability in CAPABILITIES:
        for shape in SHAPES:
            problem = problem_of(kind, shape, capability=capability, batch_invariant=True, may_split=False)
            plans = [launch_plan(problem, tokens) for tokens in (*range(1, 40), *TOKENS)]
            for configs in ({plan.gemm1 for plan in plans}, {plan.gemm2 for plan in plans}):
                assert {(c.split_k, c.uniform) for c in configs} == {(1, True)}
                # of what the warp-specialized kernel computes, it sums this alone as others do
                blocks = problem.group_size != -1
                exact = problem.family == "scaled_mm" and (problem.element == "int8" or blocks)
                assert exact or not any(config.warp_specialized for config in configs)
                assert not any(config.short_tiles for config in configs)
                # elsewhere the instruction may follow from the height
                assert capability == 90 or len(configs) == 1
            assert gemv_plan(problem, 1) is None
