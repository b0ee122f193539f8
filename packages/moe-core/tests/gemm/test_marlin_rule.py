"""The rule of the family, for any shape: what every launch relies on."""

from __future__ import annotations

import pytest
from moe_core.gemm.marlin.rule import BLOCK_N, MAX_PARTS, marlin_plan, vector_plan

_SHAPES = ((8, 2, 4096, 14336), (256, 8, 7168, 256), (32, 8, 7168, 2048), (128, 8, 2048, 768), (3, 1, 33, 65))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 512, 1500, 5000, 40000])
def test_plans_hold_together(shape: tuple[int, int, int, int], tokens: int, capability: int, bits: int) -> None:
    experts, top_k, hidden, size = shape
    plan = marlin_plan(tokens, top_k, experts, hidden, size, bits=bits, capability=capability)
    pairs = tokens * top_k
    for config, columns, width in ((plan.gemm1, hidden, 2 * size), (plan.gemm2, size, hidden)):
        assert config.swap_ab
        assert config.block_n == BLOCK_N or (config.block_n == 2 * BLOCK_N and bits == 8)
        assert plan.block_m % config.block_m == 0
        # parts have room, and none is without a step
        assert config.split_k == 1 or pairs * config.split_k * width <= MAX_PARTS
        assert config.split_k <= max(-(-columns // 128), 1)
    unsplit = marlin_plan(tokens, top_k, experts, hidden, size, bits=bits, split=False, capability=capability)
    assert (unsplit.gemm1.split_k, unsplit.gemm2.split_k) == (1, 1)


@pytest.mark.parametrize("size", [65, 768, 1856, 2048])
@pytest.mark.parametrize("tokens", [1, 600, 1200, 4000, 40000])
def test_tiles_without_halves_end_where_the_room_for_h_does(size: int, tokens: int) -> None:
    plan = marlin_plan(tokens, 8, 256, 2048, size, bits=8, gated=False)
    assert -(-size // BLOCK_N) * BLOCK_N % plan.gemm1.block_n == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("tokens", [1, 600, 40000])
def test_float32_has_small_tiles(tokens: int, capability: int) -> None:
    plan = marlin_plan(tokens, 8, 256, 2048, 768, bits=8, dtype_bytes=4, capability=capability)
    assert plan.gemm1 == plan.gemm2
    assert (plan.gemm1.block_m, plan.gemm1.block_n, plan.gemm1.split_k) == (16, BLOCK_N, 1)


def test_rows_of_a_tile_grow_with_the_rows_of_an_expert() -> None:
    rows = [marlin_plan(tokens, 8, 128, 2048, 768).gemm1.block_m for tokens in (1, 128, 300, 700, 1400, 4096)]
    assert rows == sorted(rows)
    assert rows[0] == 16
    assert rows[-1] == 128


def test_few_tiles_share_loops() -> None:
    assert marlin_plan(1, 8, 256, 7168, 256).gemm1.split_k == 8
    assert marlin_plan(1, 2, 8, 4096, 14336).gemm1.split_k == 4
    assert marlin_plan(32, 8, 128, 2048, 768).gemm1.split_k == 1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", _SHAPES)
def test_one_token_needs_no_matrix_units(shape: tuple[int, int, int, int], bits: int) -> None:
    plan = vector_plan(1, shape[1], shape[0], *shape[2:], bits=bits)
    assert plan is not None
    for config in (plan.gemm1, plan.gemm2):
        # turns of gate and up rows stay whole; a thread has four words
        assert config.block_n % 16 == 0
        assert config.block_n * config.block_w >= 4 * 32 * config.num_warps
    assert vector_plan(1, shape[1], shape[0], *shape[2:], bits=bits, capability=80) is not None


def test_tokens_that_share_experts_take_tiles() -> None:
    assert vector_plan(2, 8, 128, 2048, 768) is not None
    assert vector_plan(2, 2, 8, 4096, 14336) is None
    assert vector_plan(3, 8, 256, 7168, 256) is None
    # no room for the results of the pairs
    assert vector_plan(1, 64, 256, MAX_PARTS // 64 + 1, 256) is None
