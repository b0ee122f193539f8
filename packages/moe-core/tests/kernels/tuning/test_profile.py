"""Tuning profiles: the file and back, what is refused, and where they are found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from moe_core import ConfigError, DeviceInfo, FusedMoEConfig, MoEError
from moe_core.kernels.gemm.heuristics import KERNELS, LayerProblem, gemv_plan, launch_plan
from moe_core.kernels.gemm.heuristics.tuned import TunedRange
from moe_core.kernels.tuning import TunedLayer, TuningProfile
from moe_core.kernels.tuning.places import user_path
from moe_core.spec.environment import distribution_version

GPU = DeviceInfo("cuda", "sm90", "NVIDIA H200", 132, 227 << 10)
CONFIG = FusedMoEConfig(128, 8, 2048, 768)
INT4 = LayerProblem("mixed_input", "int4", 128, 8, 2048, 768)
E4M3 = LayerProblem("scaled_mm", "e4m3", 128, 8, 2048, 768, dtype_bytes=2, group_size=128)


def profile() -> TuningProfile:
    """Two layers, kernels with and without tensor cores."""
    vectors = gemv_plan(INT4, 1)
    assert vectors is not None
    int4 = (TunedRange(1, 1, vectors, 20.5, 18.0), TunedRange(2, 64, launch_plan(INT4, 64), 90.0, 80.0))
    e4m3 = (TunedRange(1, 512, launch_plan(E4M3, 512), 300.0, 299.0),)
    return (
        TuningProfile.of_this_machine(GPU)
        .with_layer(TunedLayer("wna16", "kInt4Static[1x128]", None, INT4, int4))
        .with_layer(TunedLayer("fp8", "kFp8Static128BlockSym", "kFp8Dynamic128Sym", E4M3, e4m3))
    )


def test_there_and_back() -> None:
    assert TuningProfile.from_json(profile().to_json().encode(), "p.json") == profile()


def test_a_layer_is_measured_anew() -> None:
    again = replace(profile().layers[0], ranges=())
    found = profile().with_layer(again)
    assert found.layers == (profile().layers[1], again)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    data = profile().as_dict()
    change(data)
    return json.dumps(data).encode()


def _plan(data: dict[str, Any], layer: int = 0, number: int = 1) -> dict[str, Any]:
    plan: dict[str, Any] = data["layers"][layer]["ranges"][number]["plan"]
    return plan


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda d: d.update(profile=2), "no tuning profile of form 1: profile is '2'"),
        (lambda d: d.update(gpu=3), "gpu, arch and kernels"),
        (lambda d: d.update(versions=[]), "versions is"),
        (lambda d: d.update(layers={}), "layers is"),
        (lambda d: d["layers"].append(1), "layers[2] is '1'"),
        (lambda d: d["layers"][0]["problem"].update(family="fast"), "problem.family is 'fast', expected one of"),
        (lambda d: d["layers"][0]["problem"].update(top_k=0), "a size is not positive"),
        (lambda d: d["layers"][0]["problem"].pop("top_k"), "problem.top_k is missing"),
        (lambda d: d["layers"][0].update(scheme=None), "are names, one is not"),
        (lambda d: d["layers"][0]["ranges"][0].update(first=0), "first and last are 0 and 1"),
        (lambda d: d["layers"][0]["ranges"][1].update(first=1), "begins before the one before it ends"),
        (lambda d: d["layers"][0]["ranges"][0].update(best_us="fast"), "expected µs"),
        (lambda d: d["layers"][0]["problem"].update(group_size=0), "group_size is 0, expected a number of columns, or"),
        (lambda d: d["layers"][0]["problem"].update(group_size=-2), "problem.group_size is -2"),
        (lambda d: _plan(d).update(kind="magic"), "expected a plan of the kind tiles or gemv"),
        (lambda d: _plan(d).update(kind=["tiles"]), "expected a plan of the kind tiles or gemv"),
        (lambda d: _plan(d).update(gemm3={}), "plan.gemm3 is not known"),
        (lambda d: _plan(d).update(pdl=1), "plan.pdl is '1', expected bool"),
        (lambda d: _plan(d)["gemm1"].update(num_warps=True), "gemm1.num_warps is 'True', expected int"),
        (lambda d: _plan(d)["gemm1"].update(block_m=24), "gemm1: block_m is 24, expected a power of two"),
        (lambda d: _plan(d)["gemm1"].update(block_n=1024), "block_n is 1024, expected 8 to 256"),
        (lambda d: _plan(d)["gemm2"].update(num_stages=0), "gemm2: num_stages is 0, expected 1 to 8"),
        (
            lambda d: _plan(d)["gemm2"].update(swap_ab=False),
            "swap_ab is False, which no built-in choice for such a layer has",
        ),
        (lambda d: _plan(d)["gemm2"].update(split_k=16), "split_k is 16, but the mainloop has 6 steps"),
        (lambda d: _plan(d)["gemm1"].update(split_k=16), "partial sums of 64 tokens do not fit the workspace"),
        # few rows sum each step by itself, many multiply the weights by their scales
        (lambda d: _plan(d)["gemm1"].update(block_m=128), "round differently from the built-in choice"),
        (lambda d: _plan(d, 0, 0)["gemm1"].update(block_n=16, block_w=32, num_warps=8), "without four words each"),
        (lambda d: d["layers"][0]["ranges"][0].update(last=1, plan=_plan(d, 1, 0)), "swap_ab is False"),
        (lambda d: _plan(d, 1, 0)["gemm1"].update(block_n=64), "block_n is 64, expected one of [128]"),
        (lambda d: _plan(d, 1, 0)["gemm1"].update(warp_specialized=True), "fixed tiles"),
    ],
)
def test_what_no_kernel_takes_is_refused(change: Callable[[dict[str, Any]], object], part: str) -> None:
    with pytest.raises(ConfigError, match=r"^p\.json") as caught:
        TuningProfile.from_json(changed(change), "p.json")
    assert part in str(caught.value)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (object or list, key or index in it) of ``data``."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], (dict, list)):
            yield from places(data[key])


@pytest.mark.parametrize("value", [None, [], {}, 0, -1, "x", 1e308, True], ids=repr)
def test_any_other_value_is_refused_or_does_no_harm(value: Any) -> None:
    data = profile().as_dict()
    escaped = []
    for holder, key in places(data):
        before, holder[key] = holder[key], value
        try:
            found = TuningProfile.from_json(json.dumps(data).encode(), "p.json")
            found.reason_against(GPU)
            found.find("kInt4Static[1x128]", None, INT4)
        except MoEError:
            pass
        except Exception as error:
            escaped.append((key, error))
        holder[key] = before
    assert not escaped
    assert data == profile().as_dict()


@pytest.mark.parametrize(("then", "fits"), [("3.6.0", True), ("3.6.2", True), ("3.5.0", False), ("3.7.0", False)])
def test_a_minor_version_of_triton_is_another_compiler(then: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_core.kernels.tuning.profile.distribution_version", lambda name: "3.6.1")
    reason = replace(profile(), versions={"triton": then}).reason_against(GPU)
    assert (reason is None) == fits
    assert fits or f"measured with Triton {then}, this is 3.6.1" in str(reason)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"profile": 1', b"\xff", b"{}"])
def test_what_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        TuningProfile.read(file)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        TuningProfile.read(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("change", "device", "part"),
    [
        (
            lambda d: None,
            replace(GPU, name="NVIDIA H100"),
            "measured on NVIDIA H200 (sm90), this is NVIDIA H100 (sm90)",
        ),
        (lambda d: d.update(kernels=KERNELS + 1), GPU, f"state {KERNELS + 1} of the kernels, expected {KERNELS}"),
        (lambda d: d["versions"].update(triton="2.1.0"), GPU, "measured with Triton 2.1.0, this is"),
        (lambda d: d["versions"].pop("triton"), GPU, "measured with Triton None, this is"),
    ],
)
def test_what_was_measured_elsewhere_is_not_used(
    change: Callable[[dict[str, Any]], object], device: DeviceInfo, part: str
) -> None:
    reason = TuningProfile.from_json(changed(change), "p.json").reason_against(device)
    assert reason is not None
    assert part in reason
    assert profile().reason_against(GPU) is None
    # a version of torch, or of the package itself, is told and not asked for
    other = replace(profile(), versions={"triton": distribution_version("triton"), "torch": "1", "moe-core": "0"})
    assert other.reason_against(GPU) is None


def test_configurations_of_other_kernels_are_not_read() -> None:
    """They may have fields that these do not know."""

    def change(data: dict[str, Any]) -> None:
        data["kernels"] = KERNELS + 1
        _plan(data)["gemm1"]["unheard_of"] = 1

    assert TuningProfile.from_json(changed(change), "p.json").layers == ()


def test_the_users_own_profile_is_named_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert user_path("NVIDIA H200", cache) == tmp_path / "moe-core/tuning/NVIDIA_H200.json"
    assert user_path("../../x\0/NVIDIA", cache) == tmp_path / "moe-core/tuning/x_NVIDIA.json"
    assert user_path("...", cache) is None
    monkeypatch.setenv("HOME", str(tmp_path))
    for elsewhere in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert user_path("a", elsewhere) == tmp_path / ".cache/moe-core/tuning/a.json"
