"""Launch rules, for any shape: what every launch relies on."""

from __future__ import annotations

import pytest
from moe_core.gemm.marlin.rule import MAX_PARTS, marlin_plan
from moe_core.gemm.workspaces import split_workspace
from moe_mxfp4.kernels.e4m3_rule import BLOCK_N, e4m3_plan
from moe_mxfp4.kernels.marlin_rule import e2m1_plan

SHAPES = ((128, 4, 2880, 2880), (32, 4, 2880, 2880), (1, 1, 7168, 6016), (2, 2, 4096, 14336), (3, 1, 33, 65))
EVERY = pytest.mark.parametrize("shape", SHAPES)
TOKENS = pytest.mark.parametrize("tokens", [1, 7, 12, 24, 64, 300, 512, 768, 1500, 5000, 40000])
CAPABILITIES = pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])


@CAPABILITIES
@EVERY
@TOKENS
def test_e4m3(shape: tuple[int, int, int, int], tokens: int, capability: int) -> None:
    experts, top_k, hidden, size = shape
    room = split_workspace(batched=False).shape[0]
    for gated, static in ((True, False), (True, True), (False, False)):
        plan = e4m3_plan(tokens, top_k, experts, hidden, size, gated=gated, static=static, capability=capability)
        for config, columns, width in ((plan.gemm1, hidden, (2 if gated else 1) * size), (plan.gemm2, size, hidden)):
            assert config.swap_ab
            assert plan.block_m % config.block_m == 0
            # an epilogue that quantises fills h up to whole 128 columns
            assert config.block_n == BLOCK_N or not (static or config is plan.gemm2)
            assert config.split_k == 1 or tokens * top_k * config.split_k * width <= room
            assert config.split_k <= max(-(-columns // 128), 1)


@CAPABILITIES
@EVERY
@TOKENS
def test_e2m1(shape: tuple[int, int, int, int], tokens: int, capability: int) -> None:
    experts, top_k, hidden, size = shape
    plan = e2m1_plan(tokens, top_k, experts, hidden, size, capability=capability)
    family = marlin_plan(tokens, top_k, experts, hidden, size, capability=capability)
    mean = tokens * top_k / experts
    if not 12 < mean <= 48 or not 90 <= capability < 120:
        assert plan == family
    for config, width in ((plan.gemm1, 2 * size), (plan.gemm2, hidden)):
        assert config.swap_ab
        assert config.block_n == BLOCK_N
        assert plan.block_m % config.block_m == 0
        assert config.split_k == 1 or tokens * top_k * config.split_k * width <= MAX_PARTS


def test_rows_of_a_tile_grow_with_the_rows_of_an_expert() -> None:
    for rule in (e2m1_plan, e4m3_plan):
        rows = [rule(tokens, 4, 128, 2880, 2880).gemm1.block_m for tokens in (1, 128, 512, 1024, 2000, 8000)]
        assert rows == sorted(rows)
        assert rows[0] == 16
        assert rows[-1] == 128


def test_one_token_of_gpt_oss_shares_loops() -> None:
    assert (e2m1_plan(1, 4, 128, 2880, 2880).gemm1.split_k, e2m1_plan(1, 4, 128, 2880, 2880).gemm2.split_k) == (4, 4)
    assert e4m3_plan(1, 4, 128, 2880, 2880).gemm1.split_k == 4
