"""The script that compares the cost model with measured times, on times that the model made."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_core import FusedMoEConfig, FusedMoEParallelConfig
from moe_core.parallel.distributed.cost import ALL_GATHER, ALL_TO_ALL, MACHINES, PUSH, Kind, Machine, layer_cost

H200 = MACHINES["h200"]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("distributed", "distributed_model", "graph_time"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import distributed_model

    return distributed_model


def results(model: Any, ranks: int, true: Machine, noise: float) -> dict[str, Any]:
    """As ``distributed.py`` writes them, of a machine with the ``true`` figures; every second point is off."""
    meta = {"gpu": "NVIDIA H200", "ranks": ranks, "layers": {"top8": {"E": 128, "k": 8, "K": 4096, "N": 1536}}}
    rows = [
        {
            "peer": all2all,
            "layer": "top8",
            "scheme": "fp8_block",
            "points": [{"M": m, "us": 100.0, "alone_us": 50.0} for m in (8, 64, 8192)],
        }
        for all2all in ("alltoall", "allgather_reducescatter", "low_latency")
    ]
    made = {"meta": meta, "results": rows}
    times = iter(model.points(made))
    for row in rows:
        for number, point in enumerate(row["points"]):
            point["us"] = next(times).predicted(true) * (1 + noise * (-1) ** number)
    return made


def test_the_fitted_model_is_within_the_noise(model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {name: Kind(2 * kind.call, 0.8 * kind.efficiency) for name, kind in MACHINES["h200"].kinds.items()}
    true = replace(MACHINES["h200"], kinds=kinds)
    files = []
    for ranks, noise in ((2, 0.01), (4, -0.01)):
        files.append(tmp_path / f"{ranks}.json")
        files[-1].write_text(json.dumps(results(model, ranks, true, noise)))
    machine = tmp_path / "machine.json"
    assert model.main([*map(str, files), "--machine", str(machine), "--within", "4"]) == 0
    assert model.main([*map(str, files), "--within", "0.1"]) == 1
    assert "largest deviation" in capsys.readouterr().out
    found = Machine.load(str(machine)).kinds["push"]
    assert found.efficiency == pytest.approx(true.kinds["push"].efficiency, rel=0.05)


def test_measured_layers_give_back_what_they_were_made_of(model: Any) -> None:
    true = Machine.from_json(
        {**H200.to_json(), "kinds": {"all_to_all": {"call": 9e-6, "efficiency": 0.7}, "push": vars(Kind(1e-6, 0.5))}}
    )
    samples = []
    for ranks in (2, 4, 16):
        config = FusedMoEConfig(64, 4, 4096, 1024, parallel=FusedMoEParallelConfig(ep_size=ranks, dp_size=ranks))
        for name in ("alltoall", "low_latency"):
            for tokens in (1, 64, 16384):
                cost = layer_cost(name, config, tokens, true)
                assert cost is not None
                assert cost.times is not None
                samples.append(model.Sample.of(cost, H200, sum(cost.times[1:])))
    fitted = model.fitted_to(H200, samples, "a test")
    for kind in (ALL_TO_ALL, PUSH):
        assert fitted.kinds[kind].call == pytest.approx(true.kinds[kind].call, rel=1e-6)
        assert fitted.kinds[kind].efficiency == pytest.approx(true.kinds[kind].efficiency)
    assert fitted.kinds[ALL_GATHER] == H200.kinds[ALL_GATHER]
    assert fitted.source == "a test"


def test_steps_within_a_domain_say_nothing_of_the_network(model: Any) -> None:
    near, far = (
        [model.Sample((PUSH,), 0.0, size, 1e-6 + 2 * size, 1, far) for size in (1e-6, 1e-3)] for far in (False, True)
    )
    found, whole = (model.fitted_to(H200, samples, "a test").kinds[PUSH] for samples in (near, far))
    assert (found.efficiency, found.far) == (pytest.approx(0.5), H200.kinds[PUSH].far)
    assert (whole.efficiency, whole.far) == (pytest.approx(0.5), pytest.approx(0.5))


def test_one_size_says_nothing_of_bytes(model: Any) -> None:
    assert model.fitted_to(H200, [model.Sample((ALL_TO_ALL,), 0.0, 1e-3, 2e-3)] * 3, "a test").kinds == H200.kinds
