"""moe tune, with a stand-in for the GPU and its clock."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import DeviceInfo, Oracle
from moe_core.cli.commands import tune
from moe_core.kernels.gemm.plan import TilePlan
from moe_core.kernels.tuning import TuningProfile
from moe_core.kernels.tuning.limits import Plan
from moe_core.kernels.tuning.places import user_path
from moe_kit.commands import Moe

GPU = DeviceInfo("cuda", "sm90", "NVIDIA H200", 132, 227 << 10, 50 << 20, 141 << 30)
pytest.importorskip("moe_wna16", reason="a layer of a scheme package is tuned")
LAYER = ("--scheme", "wna16", "--shape", "128,8,2048,768", "--weight-key", "kInt4Static[1x128]", "--backend", "marlin")


class Rig:
    """Five stages for the second product are best, except for one token."""

    def __init__(self, selection: Any) -> None:
        self.experts: Any = Oracle.make_experts(selection)

    def default(self, tokens: int) -> Plan:
        plan: Plan = self.experts.gemv_plan(tokens) or self.experts.plan(tokens)
        return plan

    def prepare(self, trials: Sequence[tuple[int, Plan]]) -> list[bool]:
        return [True] * len(trials)

    def seconds(self, tokens: int, plan: Plan) -> float:
        if tokens == 1:
            return 1e-5 if plan == self.default(1) else 2e-5
        return 1e-4 * {4: 0.8, 5: 0.5}.get(plan.gemm2.num_stages, 1.0) if isinstance(plan, TilePlan) else 1e-4


@pytest.fixture
def moe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Moe:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(tune, "_gpu", lambda name: (torch.device("cpu"), GPU))
    monkeypatch.setattr(tune, "rig_of", lambda layer, selection, device, most: nullcontext(Rig(selection)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MOE_TUNING", raising=False)
    return Moe(capsys)


def test_a_folder_and_a_shape_are_not_mixed(moe: Moe) -> None:
    for options in (("--layer", 2), ("--assume",)):
        moe.refuses("tune", *LAYER, *options, parts=(f"{options[0]} needs a checkpoint folder",))
    moe.refuses("tune", "somewhere", *LAYER, parts=("combined with --scheme and --shape",))


def test_the_best_is_written_and_found(moe: Moe) -> None:
    result = moe("tune", *LAYER, "--tokens", "1,64", "--budget", 20)
    assert result.code == 0
    path = user_path(GPU.name)
    assert path is not None
    header, _, one, many = result.out.splitlines()[1:5]
    assert header.split() == ["tokens", "built-in", "best", "saved", "changes"]
    assert one.split() == ["1", "10.0", "µs", "10.0", "µs", "0", "%", "built-in"]
    assert many.split()[:7] == ["2-64", "100.0", "µs", "50.0", "µs", "50", "%"]
    assert "gemm2.num_stages 3 -> 5" in many
    assert f"written to {path}: selection finds it" in result.out
    layer = TuningProfile.read(path).layers[0]
    assert (layer.weight_key, [one.last for one in layer.ranges]) == ("kInt4Static", [1, 64])
    plan = layer.ranges[1].plan
    assert isinstance(plan, TilePlan)
    assert (plan.gemm2.num_stages, layer.ranges[1].best_us) == (5, 50.0)
    assert TuningProfile.read(path).reason_against(GPU) is None


def test_a_profile_keeps_its_other_layers(moe: Moe, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    arguments = ("tune", "--tokens", "8", "--budget", 5, "--output", file)
    assert moe(*arguments, *LAYER).code == 0
    found = moe(*arguments, *LAYER[:2], "--shape", "64,6,2048,1408", *LAYER[4:], "--json")
    assert (found.code, found.data["file"]) == (0, str(file))
    assert [layer.problem.num_experts for layer in TuningProfile.read(file).layers] == [128, 64]
    assert moe(*arguments, *LAYER).code == 0
    assert [layer.problem.num_experts for layer in TuningProfile.read(file).layers] == [64, 128]
    # of other kernels: nothing is kept of it
    file.write_text(replace(TuningProfile.read(file), kernels=0).to_json())
    result = moe(*arguments, *LAYER)
    assert "note: the earlier content is dropped: measured with state 0 of the kernels" in result.out
    assert [layer.problem.num_experts for layer in TuningProfile.read(file).layers] == [128]


def test_runs_at_the_same_time_keep_each_others_layers(
    moe: Moe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run begins and ends while this one, which has read the file, measures its layer."""
    file = tmp_path / "p.json"
    arguments = ("tune", "--tokens", "8", "--budget", 5, "--output", file)
    other = (*LAYER[:2], "--shape", "64,6,2048,1408", *LAYER[4:])
    waiting = [other]

    def rig_of(layer: Any, selection: Any, device: torch.device, most: int) -> Any:
        while waiting:
            assert moe(*arguments, *waiting.pop()).code == 0
        return nullcontext(Rig(selection))

    monkeypatch.setattr(tune, "rig_of", rig_of)
    assert moe(*arguments, *LAYER).code == 0
    assert [layer.problem.num_experts for layer in TuningProfile.read(file).layers] == [64, 128]


def test_layers_of_a_checkpoint_that_are_alike_are_tuned_once(moe: Moe, tmp_path: Path) -> None:
    quickstart = pytest.importorskip("moe_fp8.quickstart", reason="it writes a checkpoint of several layers")
    folder, file = tmp_path / "checkpoint", tmp_path / "p.json"
    folder.mkdir()
    quickstart.MODEL.write(folder)
    found = moe("tune", folder, "--backend", "triton", "--tokens", "8", "--budget", 5, "--output", file, "--json").data
    assert [(layer["layer"], layer["backend"]) for layer in found["layers"]] == [(f"{folder} layer 0", "triton")]
    layer = TuningProfile.read(file).layers[0]
    assert (layer.scheme, layer.problem.num_experts) == ("fp8", quickstart.MODEL.EXPERTS)
    inside = folder / "config.json"
    moe.refuses("tune", folder, "--backend", "triton", "--output", inside, parts=("is in the checkpoint folder",))


def test_what_is_no_profile_of_this_gpu_is_not_replaced(moe: Moe, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    arguments = ("tune", *LAYER, "--tokens", "8", "--budget", 5, "--output", file)
    for content, part in (
        (b"{}", "is no tuning profile"),
        (TuningProfile("NVIDIA A100", "sm80").to_json().encode(), "measured on NVIDIA A100 (sm80)"),
    ):
        file.write_bytes(content)
        moe.refuses(*arguments, parts=(part, "not replaced"))
        assert file.read_bytes() == content


def test_explain_and_bench_say_what_is_used(moe: Moe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "p.json"
    assert moe("tune", *LAYER, "--tokens", "8", "--budget", 5, "--output", file).code == 0
    asked = ("explain", *LAYER, "--device", "h200")
    reason = f"{file} is not used: measured on NVIDIA H200 (sm90), this is h200 (sm90)"
    assert reason in moe(*asked, "--tuning", file).out.replace("\n", " ")
    assert json.dumps(str(file)) in moe(*asked, "--tuning", file, "--json").out
    monkeypatch.setenv("MOE_TUNING", str(file))
    assert str(file) in moe(*asked).out
    assert str(file) not in moe(*asked, "--tuning", "none").out
    moe.refuses(*asked, "--tuning", tmp_path / "nothing", parts=("nothing", "can't be read"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((*LAYER, "--budget", "0"), "argument --budget: expected a positive number"),
        ((*LAYER, "--tokens", "x"), "argument --tokens: expected an integer"),
        ((*LAYER, "--output", "/nowhere/p.json"), "the folder /nowhere does not exist"),
        ((*LAYER[:-1], "torch"), "selects its launches itself: there is nothing to tune; --backend marlin or"),
    ],
)
def test_what_is_refused(moe: Moe, arguments: tuple[str, ...], part: str) -> None:
    moe.refuses("tune", *arguments, parts=(part,))


def test_a_cpu_has_nothing_to_tune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ((), ("--device", "cpu")):
        Moe(capsys).refuses("tune", *LAYER, *device, parts=("there is nothing to tune on cpu",))
