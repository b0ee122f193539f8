"""Releases of transformers outside the tested range say so."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import tomllib
from pathlib import Path

import moe_transformers
import pytest
from moe_core import MoEError
from moe_transformers.version import TRANSFORMERS, check_version


@pytest.mark.parametrize("version", ["5.16.2", "4.57.1", "5.25.0", "5.25.0.dev0", "6.0"])
def test_others_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    expected = rf"transformers .*{version}; .*5\.17 .*5\.25"
    with pytest.raises(moe_transformers.TransformersVersionError, match=expected) as caught:
        check_version()
    assert isinstance(caught.value, MoEError)
    assert isinstance(caught.value, ImportError)


def test_the_import_says_so_before_it_needs_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    refused = moe_transformers.TransformersVersionError
    monkeypatch.delitem(sys.modules, "moe_transformers")
    # a module that cannot be imported
    for name in ("experts", "interface", "model_loading", "quantize"):
        monkeypatch.setitem(sys.modules, f"moe_transformers.{name}", None)  # type: ignore[arg-type]
    module = importlib.import_module("moe_transformers")
    for name in ("loading", "quantize_experts", "prepare_experts"):
        with pytest.raises(refused, match=r"transformers is 4\.57\.1"):
            getattr(module, name)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.1"])
def test_tested_ones_are_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    check_version()


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"transformers>={TRANSFORMERS.lowest},<{TRANSFORMERS.below}" in project["dependencies"]
