"""What happens where vLLM is not there, or is another: nothing, and one line says so.  None of it imports vLLM."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import subprocess
import sys

import moe_vllm
import pytest
from moe_core import ConfigError
from moe_core.api import engines as engine_api
from moe_vllm import plugin
from moe_vllm.doctor import lines
from moe_vllm.engine import ENGINE, LOGGER


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(plugin, "_brought", ())
    monkeypatch.delenv("MOE_VLLM", raising=False)
    return monkeypatch


def pretend(version: pytest.MonkeyPatch, found: str) -> None:
    real = importlib.metadata.version
    version.setattr(importlib.metadata, "version", lambda name: found if name == "vllm" else real(name))


def test_vllm_finds_the_plugin() -> None:
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="moe_vllm")
    assert point.load() is moe_vllm.register


@pytest.mark.parametrize("found", ["0.32.2", "0.34.0", "0.34.0rc1"])
def test_another_version_is_left_alone(
    version: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    pretend(version, found)
    version.setattr(plugin, "_bring", lambda schemes: pytest.fail("it was touched"))
    with caplog.at_level(logging.INFO, LOGGER.name):
        moe_vllm.register()
    (line,) = caplog.records
    assert line.getMessage() == f"moe-vllm is off: vllm is {found}; moe-vllm was tested with 0.33 or newer, below 0.34"
    assert line.levelname == "WARNING"


@pytest.mark.parametrize("found", ["0.33.0", "0.33.1", "0.33.0+cu129"])
def test_versions_that_fit(found: str) -> None:
    assert ENGINE.reason_against_version(found) is None


def test_off(version: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(version, "0.33.0")
    version.setenv("MOE_VLLM", "off")
    version.setattr(plugin, "_bring", lambda schemes: pytest.fail("it was touched"))
    with caplog.at_level(logging.INFO, LOGGER.name):
        moe_vllm.register()
    (line,) = caplog.records
    assert (line.getMessage(), line.levelname) == ("moe-vllm is off: MOE_VLLM=off", "INFO")


def test_a_switch_that_says_nothing_known_is_an_error(version: pytest.MonkeyPatch) -> None:
    pretend(version, "0.33.0")
    version.setenv("MOE_VLLM", "fp9")
    with pytest.raises(ConfigError, match="MOE_VLLM='fp9'") as raised:
        moe_vllm.register()
    assert lines() == [str(raised.value)]


def test_what_vllm_lacks_is_named(version: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Here all of it; nothing is raised, and a later call tries again."""
    pretend(version, "0.33.0")
    version.setitem(sys.modules, "vllm", None)
    # where vLLM's files are, it may be imported already
    version.setitem(sys.modules, "moe_vllm.oracles", None)
    version.delattr(moe_vllm, "oracles", raising=False)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, LOGGER.name):
            moe_vllm.register()
        (line,) = caplog.records
        assert line.getMessage().startswith("moe-vllm is off: vllm 0.33.0 lacks what it needs: ")


def test_schemes_are_brought_once(version: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pretend(version, "0.33.0")
    version.setenv("MOE_VLLM", "fp8,wna16")
    brought: list[tuple[str, ...]] = []
    version.setattr(plugin, "_bring", brought.append)
    with caplog.at_level(logging.INFO, LOGGER.name):
        moe_vllm.register()
        moe_vllm.register()
    assert brought == [("fp8", "wna16")]
    assert [line.getMessage() for line in caplog.records] == [
        "moe-vllm is on for fp8, wna16 (MOE_VLLM=off turns it off)"
    ]


def test_doctor_says_what_vllm_would_get(version: pytest.MonkeyPatch) -> None:
    pretend(version, "0.33.0")
    version.setattr(engine_api, "select_kernel", functools.partial(engine_api.select_kernel, device="cpu"))
    said = lines()
    assert said[0] == "moe-vllm is on for fp8, int8, mxfp4, wna16 (MOE_VLLM=off turns it off)"
    assert "fp8 kFp8Static128BlockSym x kFp8Dynamic128Sym: left to vllm, torch sees no GPU" in said
    assert len(said) == 9


def test_importing_the_package_imports_little() -> None:
    program = "import sys, moe_vllm; print({'torch', 'triton', 'vllm', 'moe_core'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
