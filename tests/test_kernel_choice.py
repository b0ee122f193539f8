"""A kernel beside an engine's own: no libraries, no loop on the host of a GPU."""

from __future__ import annotations

import functools

import pytest
from moe_core import (
    BackendRefusedError,
    DeviceInfo,
    Environment,
    FusedMoEConfig,
    NoBackendError,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    oracle,
)
from moe_core.api import engines as engine_api
from moe_core.api.engines import Engine, select_kernel
from moe_core.spec.environment import TRITON, Requirement

CONFIG = FusedMoEConfig(num_experts=8, top_k=2, hidden_size=256, intermediate_size=256)
KEYS = (kFp8Static128BlockSym, kFp8Dynamic128Sym)


def test_a_library_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = Environment({"triton": "9.0", "deep-gemm": "99.0", "deep_gemm": "99.0", "flashinfer-python": "99.0"})
    with_libraries = oracle("fp8").select(
        CONFIG, weight_key=KEYS[0], activation_key=KEYS[1], device="sm100", environment=everything
    )
    assert with_libraries.backend != "triton"

    def installed(self: Environment, requirement: Requirement) -> str:
        return "9.0" if requirement == TRITON else "99.0"

    monkeypatch.setattr(type(Environment.current()), "version", installed)
    assert select_kernel("fp8", CONFIG, *KEYS, device="sm100").backend == "triton"


def test_a_loop_on_the_host_is_no_kernel_of_a_gpu() -> None:
    with pytest.raises(NoBackendError, match="fp8: .*sm75"):
        select_kernel("fp8", CONFIG, *KEYS, device=DeviceInfo.parse("sm75"))
    with pytest.raises(NoBackendError, match="fp8: .*sm90"):
        select_kernel("fp8", CONFIG, *KEYS, device="sm90", backend="torch")
    assert select_kernel("fp8", CONFIG, *KEYS, device="cpu").backend == "torch"
    with pytest.raises(BackendRefusedError):
        select_kernel("fp8", CONFIG, *KEYS, device="cpu", backend="triton")


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("h200", "fp8 kFp8Static128BlockSym x kFp8Dynamic128Sym: triton (TritonFp8BlockExperts)"),
        ("sm75", "fp8 kFp8Static128BlockSym x kFp8Dynamic128Sym: left to an-engine, no kernel fits on sm75: triton "),
        ("cpu", "fp8 kFp8Static128BlockSym x kFp8Dynamic128Sym: left to an-engine, torch sees no GPU"),
    ],
)
def test_a_report_names_the_kernel_or_why_the_engine_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, line: str
) -> None:
    engine = Engine("moe-engine", "an-engine", lowest="1", below="2", switch="MOE_ENGINE", schemes=("fp8", "int8"))
    monkeypatch.setattr(Engine, "reason_against_version", lambda self: None)
    monkeypatch.setattr(engine_api, "select_kernel", functools.partial(select_kernel, device=device))
    monkeypatch.delenv("MOE_ENGINE", raising=False)
    usual = {"fp8": (("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),), "mxfp4": (("kMxfp4Static", None),)}
    first, second = engine.report(usual)
    assert first == "moe-engine is on for fp8, int8 (MOE_ENGINE=off turns it off)"
    assert second.startswith(line)
    monkeypatch.setenv("MOE_ENGINE", "fp9")
    [error] = engine.report(usual)
    assert "MOE_ENGINE='fp9' names 'fp9'" in error
