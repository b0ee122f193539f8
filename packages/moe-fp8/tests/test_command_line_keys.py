"""Keys by name on the command line."""

from __future__ import annotations

import json

import pytest
from moe_core.cli import _machine
from moe_core.cli.main import main

LAYER = ("--scheme", "fp8", "--shape", "4,2,256,128", "--device", "cpu", "--backend", "torch")
PAIRS = [
    ("kFp8StaticTensorSym", ("kFp8StaticTensorSym", "kFp8DynamicTensorSym", "kFp8DynamicTokenSym")),
    ("kFp8StaticChannelSym", ("kFp8StaticTensorSym", "kFp8DynamicTensorSym", "kFp8DynamicTokenSym")),
    ("kFp8Static128BlockSym", ("kFp8Dynamic128Sym",)),
    ("kFp8Static128BlockSym[128x64]", ("kFp8Dynamic64Sym",)),
    ("kFp8Static128BlockE8M0Sym", ("kFp8Dynamic128Sym",)),
    ("kMxfp8Static", ("kMxfp8Dynamic",)),
]


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str | None]:
    assert main(["explain", *LAYER, *arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    return data["chosen"], data["activation_key"]


@pytest.mark.parametrize(("weight", "activations"), PAIRS, ids=[weight for weight, _ in PAIRS])
def test_explain_knows_every_pair(
    capsys: pytest.CaptureFixture[str], weight: str, activations: tuple[str, ...]
) -> None:
    # without being told, activations that go with the weights, and not 16-bit ones
    assert explained(capsys, "--weight-key", weight)[1] in activations
    for activation in activations:
        assert explained(capsys, "--weight-key", weight, "--activation-key", activation) == ("torch", activation)
    assert explained(capsys, "--weight-key", weight, "--activation-key", "none") == ("torch", None)


@pytest.mark.parametrize("weight", [weight for weight, _ in PAIRS])
def test_bench_runs_every_weight_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weight: str
) -> None:
    # what the machine can do is measured elsewhere, in a second
    monkeypatch.setattr(_machine, "measure_limits", lambda *_: _machine.Limits(1e10, 1e10, "float32"))
    assert main(["bench", *LAYER, "--weight-key", weight, "--tokens", "2", "--budget", "0.01", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["weight_key"] == weight
    assert data["results"][0]["seconds"] > 0


def test_backends_say_where_each_pair_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--scheme", "fp8", "--json"]) == 0
    rows = {row["experts"].partition(":")[2]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    pairs = rows["TorchFp8Experts"]["keys"]
    assert all("cpu" in pair["verified_on"] for pair in pairs)
    assert ["kMxfp8Static"] in [pair["weights"] for pair in pairs]
