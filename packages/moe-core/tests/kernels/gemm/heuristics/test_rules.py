"""Launch rules by element type, which other packages may add."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from moe_core.api.experts import (
    Change,
    LaunchRules,
    LayerProblem,
    Regime,
    Tile,
    TileConfig,
    TilePlan,
    add_rules,
    within,
)
from moe_core.errors import ConfigError
from moe_core.kernels.gemm.heuristics import gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.rules import RULES, regimes_of
from moe_core.kernels.gemm.heuristics.tuned import TunedRange
from moe_core.kernels.tuning.limits import own_plans, refusals
from moe_core.kernels.tuning.profile import TunedLayer, TuningProfile

FEW, MANY = TileConfig(16, 128, 4, 3, swap_ab=True), TileConfig(64, 128, 8, 3, swap_ab=True)
NEW = LayerProblem("mixed_input", "nvfp4", 128, 8, 2048, 768)


def table(problem: LayerProblem) -> tuple[Regime, ...]:
    deep = Change({"steps": (16, inf), "split": (1, 1)}, {"num_stages": 5})
    return Regime(Tile(FEW, within((264, 4)), (deep,)), Tile(FEW), rows=12), Regime(Tile(MANY))


@pytest.fixture
def added() -> Iterator[LaunchRules]:
    rules = LaunchRules(table, overlapping_rows=4)
    add_rules("mixed_input", "nvfp4", rules)
    yield rules
    del RULES["mixed_input", "nvfp4"]
    for cached in (regimes_of, launch_plan, gemv_plan, own_plans):
        cached.cache_clear()


def test_a_new_element_needs_a_table_only(added: LaunchRules) -> None:
    plans = [launch_plan(NEW, tokens) for tokens in (1, 100, 1000)]
    # 96 programs, of which two share each of 16 steps; then 1,536 that fill the GPU
    assert [(plan.gemm1.split_k, plan.gemm1.num_stages) for plan in plans] == [(2, 3), (1, 5), (1, 3)]
    assert [(plan.block_m, plan.gemm2.num_stages, plan.pdl) for plan in plans] == [
        (16, 3, True),
        (16, 3, False),
        (64, 3, False),
    ]
    assert NEW.bits == 4
    assert gemv_plan(NEW, 1) is None
    assert not refusals(NEW, plans[0], 1, 1)


def test_an_element_has_one_set_of_rules(added: LaunchRules) -> None:
    add_rules("mixed_input", "nvfp4", added)
    with pytest.raises(ConfigError, match="nvfp4"):
        add_rules("mixed_input", "nvfp4", LaunchRules(table))
    with pytest.raises(ConfigError, match="int4"):
        add_rules("mixed_input", "int4", added)


def test_profiles_may_hold_elements_of_packages_that_are_not_imported() -> None:
    rules, plan = LaunchRules(table), TilePlan(replace(FEW, split_k=3), FEW)
    layer = TunedLayer("nvfp4", "nvfp4", None, NEW, (TunedRange(1, 4, plan),))
    text = TuningProfile("a GPU", "sm90", (layer,), versions={"triton": "3.6.0"}).to_json().encode()
    read = TuningProfile.from_json(text, "a file")
    assert read.layers == (layer,)
    add_rules("mixed_input", "nvfp4", rules)
    try:
        # it is checked against the rules as soon as they are there
        for call in (lambda: read.find("nvfp4", None, NEW), lambda: TuningProfile.from_json(text, "a file")):
            with pytest.raises(ConfigError, match="split_k"):
                call()
    finally:
        del RULES["mixed_input", "nvfp4"]
        for cached in (regimes_of, launch_plan, own_plans):
            cached.cache_clear()


def test_an_unknown_element_is_named() -> None:
    with pytest.raises(ConfigError, match="fp6"):
        launch_plan(LayerProblem("scaled_mm", "fp6", 8, 2, 1024, 1024), 1)


@pytest.mark.parametrize(("element", "bits"), [("int4", 4), ("int8", 8), ("e2m1", 4), ("e4m3", 8), ("bf16", 16)])
def test_the_name_of_an_element_states_its_bits(element: str, bits: int) -> None:
    assert LayerProblem("mixed_input", element, 8, 2, 1024, 1024).bits == bits
