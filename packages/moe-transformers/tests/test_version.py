"""Releases of transformers outside the tested range say so."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import moe_transformers
import pytest
from moe_core import MoEError
from moe_transformers.version import TRANSFORMERS


@pytest.mark.parametrize("version", ["5.16.2", "4.57.1", "5.24.0", "5.24.0.dev0", "6.0"])
def test_others_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    expected = rf"transformers is {version}; .* tested with 5\.17 or newer, below 5\.24: pip install"
    with pytest.raises(moe_transformers.TransformersVersionError, match=expected) as caught:
        moe_transformers.check_version()
    assert isinstance(caught.value, MoEError)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["5.17.0", "5.23.4"])
def test_tested_ones_are_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    moe_transformers.check_version()


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"transformers>={TRANSFORMERS.lowest},<{TRANSFORMERS.below}" in project["dependencies"]
