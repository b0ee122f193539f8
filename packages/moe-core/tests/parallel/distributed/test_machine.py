"""Figures of machines: checked, written and read, fitted to measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from moe_core import ConfigError, FusedMoEConfig, FusedMoEParallelConfig
from moe_core.parallel.distributed.cost import layer_cost
from moe_core.parallel.distributed.machine import ALL_GATHER, ALL_TO_ALL, MACHINES, PUSH, Kind, Machine, Sample

H200 = MACHINES["h200"]


@pytest.mark.parametrize("name", MACHINES)
def test_machines_survive_json(name: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(MACHINES[name].to_json()))
    assert Machine.load(str(path)) == MACHINES[name] == Machine.load(name)


def test_a_machine_is_found_by_its_gpu() -> None:
    assert Machine.of_device("NVIDIA H200") == H200
    assert Machine.of_device("h200") == H200
    assert Machine.of_device("NVIDIA A100-SXM4-80GB") == MACHINES["a100"]
    assert Machine.of_device("cpu") is None


def test_a_rate_of_operands_that_has_none_is_that_of_wider_ones() -> None:
    assert H200.rate(4) == H200.rate(8) == 1979e12
    assert H200.rate(16) == H200.rate(32) == 989e12


def test_measured_layers_give_back_what_they_were_made_of() -> None:
    true = Machine.from_json(
        {**H200.to_json(), "kinds": {"all_to_all": {"call": 9e-6, "efficiency": 0.7}, "push": vars(Kind(1e-6, 0.5))}}
    )
    samples: list[Sample] = []
    for ranks in (2, 4, 16):
        config = FusedMoEConfig(64, 4, 4096, 1024, parallel=FusedMoEParallelConfig(ep_size=ranks, dp_size=ranks))
        for name in ("alltoall", "low_latency"):
            for tokens in (1, 64, 16384):
                cost = layer_cost(name, config, tokens, true)
                assert cost is not None
                assert cost.latency is not None
                assert cost.transfer is not None
                samples.append(cost.sample(H200, cost.latency + cost.transfer))
    fitted = H200.fitted(samples, "a test")
    for kind in (ALL_TO_ALL, PUSH):
        assert fitted.kinds[kind].call == pytest.approx(true.kinds[kind].call, rel=1e-6)
        assert fitted.kinds[kind].efficiency == pytest.approx(true.kinds[kind].efficiency)
    assert fitted.kinds[ALL_GATHER] == H200.kinds[ALL_GATHER]
    assert fitted.source == "a test"


def test_steps_within_a_domain_say_nothing_of_the_network() -> None:
    near, far = (
        [Sample((PUSH,), 0.0, size, 1e-6 + 2 * size, 1, far) for size in (1e-6, 1e-3)] for far in (False, True)
    )
    found, whole = (H200.fitted(samples, "a test").kinds[PUSH] for samples in (near, far))
    assert (found.efficiency, found.far) == (pytest.approx(0.5), H200.kinds[PUSH].far)
    assert (whole.efficiency, whole.far) == (pytest.approx(0.5), pytest.approx(0.5))


def test_one_size_says_nothing_of_bytes() -> None:
    assert H200.fitted([Sample((ALL_TO_ALL,), 0.0, 1e-3, 2e-3)] * 3, "a test").kinds == H200.kinds


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"domain": 0}, "domain .*0"),
        ({"near": {"bandwidth": 0, "latency": 0}}, "near.bandwidth .*0"),
        ({"sync": -1}, r"\bsync\b"),
        ({"rates": {"8": 1.0}}, "16 bits"),
        ({"kinds": {"pigeon": {"call": 0, "efficiency": 1}}}, "'pigeon'"),
        ({"wings": 2}, "machine"),
        ({"near": 3}, "machine"),
    ],
)
def test_figures_that_cannot_be_are_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Machine.from_json({**H200.to_json(), **change})


def test_files_that_hold_no_machine_are_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ConfigError, match="machine.json"):
        Machine.load(str(path))
    path.write_text("{")
    with pytest.raises(ConfigError, match="machine.json"):
        Machine.load(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"machine.json .*list"):
        Machine.load(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"machine.json .*deeply"):
        Machine.load(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"machine.json.* machine"):
        Machine.load(str(path))
    with pytest.raises(ConfigError, match="'h20o'"):
        Machine.load("h20o")
