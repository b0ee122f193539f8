"""Heights of tiles follow how many rows experts have, of which the mean is only one thing."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from moe_core.kernels.gemm.heuristics import LayerProblem, launch_plan
from moe_core.kernels.gemm.heuristics.cost import expected_tiles

#: experts, top-k, hidden size, intermediate size
MIXTRAL, QWEN3, GLM = (8, 2, 4096, 14336), (128, 8, 2048, 768), (128, 8, 4096, 1408)
#: times of an expert's first tile and of its others by their rows, as parts of one with 16: measured on an H200
#: (docs/design/mixed_input.md, scaled_mm.md)
TIMES = {
    "int4": {16: (1.0, 0.6), 32: (1.25, 1.0), 64: (1.4, 1.4), 128: (1.53, 1.53)},
    "e4m3": {16: (1.0, 1.5), 32: (1.04, 1.5)},
}
Element = Literal["int4", "e4m3"]


def problem_of(element: Element, shape: tuple[int, int, int, int]) -> LayerProblem:
    if element == "int4":
        return LayerProblem("mixed_input", element, *shape)
    return LayerProblem("scaled_mm", element, *shape, dtype_bytes=1, group_size=128)


def height(problem: LayerProblem, tokens: int) -> int:
    return launch_plan(problem, tokens).block_m


def predicted(problem: LayerProblem, tokens: int, rows: int) -> float:
    """Time of an expert whose tiles have ``rows``."""
    element: Element = "int4" if problem.bits == 4 else "e4m3"
    first, others = TIMES[element][rows]
    return first + others * (expected_tiles(problem, tokens, rows) - 1)


@pytest.mark.parametrize("shape", [MIXTRAL, QWEN3])
@pytest.mark.parametrize("rows", [16, 32, 128])
def test_expected_tiles_are_those_of_uniform_routing(shape: tuple[int, int, int, int], rows: int) -> None:
    problem = problem_of("int4", shape)
    experts, top_k = shape[:2]
    generator = torch.Generator().manual_seed(0)
    for mean in (8, 12, 16, 24, 100, 128):
        tokens, calls = mean * experts // top_k, 4000 // experts
        scores = torch.rand(calls, tokens, experts, generator=generator)
        ids = scores.topk(top_k, dim=2).indices.flatten(1)
        counts = torch.stack([torch.bincount(one, minlength=experts) for one in ids])
        found = (-(-counts // rows)).double().mean().item()
        # 4000 numbers of tiles, each off by at most one from another
        assert expected_tiles(problem, tokens, rows) == pytest.approx(found, abs=4 * 0.5 / 4000**0.5 + 0.01)


@pytest.mark.parametrize("element", TIMES)
@pytest.mark.parametrize("shape", [MIXTRAL, QWEN3, GLM])
def test_no_height_is_kept_when_too_many_experts_have_a_second_tile(
    element: Element, shape: tuple[int, int, int, int]
) -> None:
    """Within 5 % of the best height by the times of tiles, at every number of tokens."""
    problem = problem_of(element, shape)
    for mean in range(2, 100):
        tokens = mean * shape[0] // shape[1]
        chosen = height(problem, tokens)
        if chosen not in TIMES[element]:
            break
        best = min(predicted(problem, tokens, rows) for rows in TIMES[element])
        assert predicted(problem, tokens, chosen) <= 1.05 * best, (tokens, chosen)


def test_heights_rise_with_the_tokens() -> None:
    for element in TIMES:
        for shape in (MIXTRAL, QWEN3, GLM):
            problem = problem_of(element, shape)  # type: ignore[arg-type]
            found = [height(problem, tokens) for tokens in range(1, 1500)]
            assert found == sorted(found)
            assert found[0] == (8 if element in ("int4", "e2m1") else 16)


def test_no_tokens_have_no_tiles() -> None:
    problem = problem_of("e4m3", (8, 2, 4096, 14336))
    assert expected_tiles(problem, 0, 16) == 0
    assert height(problem, 0) == 16
