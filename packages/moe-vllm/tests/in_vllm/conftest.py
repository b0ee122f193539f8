"""vLLM with stand-ins for what is not installed; its functions are replaced for one test at a time."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import moe_core as mc
import pytest
import vllm_stand_ins
from moe_core.api import engines as engine_api

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
vllm_stand_ins.install()

with warnings.catch_warnings():  # vLLM's own, of the packages around it
    warnings.simplefilter("ignore")
    import vllm._custom_ops as ops
    import vllm_formats  # all of vLLM that is used here
    from moe_vllm import experts, oracles

# its compiled operators are not there
ops.scaled_fp8_quant = vllm_formats.quantize_fp8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "in_vllm" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(params=["cpu", "h200"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels are chosen for the CPU, or for a GPU that is not here; vLLM's platform is a CPU in both."""

    def select_kernel(*asked: Any, device: Any = None) -> mc.Selection:
        return engine_api.select_kernel(*asked, device=request.param)

    monkeypatch.setattr(experts, "select_kernel", select_kernel)
    monkeypatch.setattr(experts.MoeCoreExperts, "_supports_current_device", staticmethod(lambda: True))
    return str(request.param)


@pytest.fixture
def brought(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The experts are brought; gives the log."""
    from moe_core.api.engines import log_once

    log_once.cache_clear()
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.INFO, "vllm.moe_vllm")
    changes = oracles.install(("fp8", "int8", "mxfp4", "wna16"))
    try:
        yield caplog
    finally:
        oracles.undo(changes)
