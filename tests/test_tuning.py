"""Tuning profiles and selection: what is used, what is not and why, and that only launches change."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import moe_core as mc
import pytest
from moe_core import ConfigError, DeviceInfo, FusedMoEConfig
from moe_core.kernels.experts.grouped import GroupedExperts
from moe_core.kernels.gemm.heuristics.tuned import TunedRange
from moe_core.kernels.gemm.plan import GemvPlan, TilePlan
from moe_core.kernels.tuning import TunedLayer, TuningProfile
from moe_core.kernels.tuning.choice import name_of
from moe_core.kernels.tuning.places import user_path
from moe_core.selection.report import Selection

GPU = DeviceInfo("cuda", "sm90", "NVIDIA H200", 132, 227 << 10, 50 << 20, 141 << 30)
CONFIG = FusedMoEConfig(128, 8, 2048, 768)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No profile is named, and the user has none."""
    monkeypatch.delenv("MOE_TUNING", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = user_path(GPU.name)
    assert path is not None
    path.parent.mkdir(parents=True)
    return path


def selected(
    tuning: TuningProfile | Path | str | None = None, device: DeviceInfo = GPU, **changes: object
) -> Selection:
    return mc.oracle("wna16").select(
        replace(CONFIG, **changes),
        weight_key="kInt4Static[1x128]",
        activation_key=None,
        moe_backend="marlin",
        device=device,
        tuning=tuning,
    )


def experts_of(selection: Selection) -> GroupedExperts:
    made = mc.Oracle.make_experts(selection)
    assert isinstance(made, GroupedExperts)
    return made


def measured() -> tuple[TuningProfile, TilePlan]:
    """A profile, by which one token takes tiles, and up to 64 another plan than the heuristics'."""
    experts = experts_of(selected())
    one, many = experts.plan(1), experts.plan(64)
    other = replace(many, gemm1=replace(many.gemm1, num_stages=2), gemm2=replace(many.gemm2, num_warps=8))
    assert other != many
    layer = TunedLayer(
        "wna16",
        name_of(experts.weight_key),
        None,
        experts.problem,
        (TunedRange(1, 1, one, 20, 18), TunedRange(33, 64, other, 90, 80)),
    )
    return TuningProfile.of_this_machine(GPU).with_layer(layer), other


def test_a_profile_changes_launches_and_nothing_else() -> None:
    profile, other = measured()
    without, tuned = selected(), selected(profile)
    assert without.report.tuning is None
    assert (tuned.backend, tuned.experts) == (without.backend, without.experts)
    assert "tuning: the given profile: launch configurations for 2 ranges of tokens, up to 64" in str(tuned.report)
    built_in, experts = experts_of(without), experts_of(tuned)
    # the nearest measured number above; between the ranges and beyond them the heuristics
    assert experts.plan(33) == experts.plan(50) == experts.plan(64) == other
    for tokens in (2, 32, 65, 4096):
        assert experts.plan(tokens) == built_in.plan(tokens)
        assert experts.gemv_plan(tokens) == built_in.gemv_plan(tokens)
    assert isinstance(built_in.gemv_plan(1), GemvPlan)
    assert experts.gemv_plan(1) is None
    # of the interpreter's plans too
    assert experts.plan(64, on_gpu=False) == other.interpreted()


def test_a_path_is_given_or_named_or_found(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, other = measured()
    file = tmp_path / "p.json"
    file.write_text(profile.to_json())
    for tuning in (file, str(file)):
        assert experts_of(selected(tuning)).plan(64) == other
    assert experts_of(selected()).plan(64) != other
    cache.write_text(profile.to_json())
    found = selected()
    assert experts_of(found).plan(64) == other
    assert str(cache) in str(found.report)
    assert found.report.as_dict()["tuning"] == {"source": str(cache), "used": True, "ranges": 2, "reason": ""}
    assert selected("none").report.tuning is None
    # what is named goes before what is found
    file.write_text(TuningProfile.of_this_machine(GPU).to_json())
    monkeypatch.setenv("MOE_TUNING", str(file))
    assert f"{file} is not used: it holds nothing of this layer" in str(selected().report)
    monkeypatch.setenv("MOE_TUNING", "none")
    assert selected().report.tuning is None


def test_a_file_that_has_changed_is_read_again(cache: Path) -> None:
    profile, other = measured()
    cache.write_text(profile.to_json())
    assert experts_of(selected()).plan(64) == other
    cache.write_text(TuningProfile.of_this_machine(GPU).to_json())
    os.utime(cache, ns=(1, 1))
    assert experts_of(selected()).plan(64) != other


def test_a_broken_file_is_a_reason_where_it_was_found_and_an_error_where_it_was_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("{")
    found = selected()
    assert f"tuning: {cache} is not used: " in str(found.report)
    assert experts_of(found).tuned is None
    with pytest.raises(ConfigError, match=str(cache)):
        selected(cache)
    monkeypatch.setenv("MOE_TUNING", str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigError, match=r"MOE_TUNING: .*nothing\.json"):
        selected()


def test_a_profile_of_something_else_is_not_used() -> None:
    profile, _ = measured()
    for reason, selection in {
        "measured on NVIDIA H200 (sm90), this is NVIDIA L40S (sm89)": selected(
            profile, DeviceInfo("cuda", "sm89", "NVIDIA L40S")
        ),
        "measured with state 0 of the kernels": selected(replace(profile, kernels=0)),
        "it holds nothing of this layer": selected(profile, intermediate_size=1024),
        "a batch-invariant layer keeps one configuration": selected(profile, batch_invariant=True),
    }.items():
        assert reason in str(selection.report)
        assert experts_of(selection).tuned is None
    # another class of experts: what was measured is of these kernels
    fp8 = mc.oracle("fp8").select(
        CONFIG,
        weight_key="kFp8Static128BlockSym",
        activation_key="kFp8Dynamic128Sym",
        moe_backend="torch",
        device=GPU,
        tuning=profile,
    )
    assert "TorchFp8Experts selects its launches itself" in str(fp8.report)


def test_a_cpu_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TUNING", "nothing.json")
    selection = mc.oracle("wna16").select(CONFIG, weight_key="kInt4Static[1x128]", activation_key=None, device="cpu")
    assert selection.report.tuning is None


@pytest.mark.parametrize("device", [GPU, DeviceInfo.parse("cpu")], ids=["gpu", "cpu"])
def test_a_profile_that_was_named_is_read_wherever_the_layer_runs(device: DeviceInfo, tmp_path: Path) -> None:
    given = {"weight_key": "kInt4Static[1x128]", "activation_key": None, "device": device}
    with pytest.raises(ConfigError, match="read"):
        mc.oracle("wna16").select(CONFIG, **given, tuning=tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="tuning .*3"):
        mc.oracle("wna16").select(CONFIG, **given, tuning=3)
