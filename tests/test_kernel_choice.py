"""A kernel beside an engine's own: no libraries, no loop on the host of a GPU."""

from __future__ import annotations

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
from moe_core.engine_api import select_kernel
from moe_core.environment import TRITON, Requirement

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
    with pytest.raises(NoBackendError, match=r"fp8: no kernel fits on sm80: .*triton needs sm89"):
        select_kernel("fp8", CONFIG, *KEYS, device=DeviceInfo.parse("sm80"))
    with pytest.raises(NoBackendError, match="fp8: no kernel fits on sm90"):
        select_kernel("fp8", CONFIG, *KEYS, device="sm90", backend="torch")
    assert select_kernel("fp8", CONFIG, *KEYS, device="cpu").backend == "torch"
    with pytest.raises(BackendRefusedError):
        select_kernel("fp8", CONFIG, *KEYS, device="cpu", backend="triton")
