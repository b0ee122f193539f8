"""The script that compares the cost model with measured times, on times that the model made."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_core.parallel.distributed.machine import MACHINES, Kind, Machine

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
