"""The command line, in an installation that has the scheme ``plain`` alone."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moe_core.selection.registry import KNOWN_SCHEMES, registry
from moe_core_checkpoints import entry_points, layer_tensors, write
from moe_kit.commands import Moe


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing else is installed, and there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    version = importlib.metadata.version

    def without_schemes(name: str) -> str:
        if name in KNOWN_SCHEMES.values():
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_schemes)
    registry.cache_clear()
    yield
    registry.cache_clear()


@pytest.fixture
def moe(plain: None, capsys: pytest.CaptureFixture[str]) -> Moe:
    return Moe(capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with MoE in its layers 1 and 2."""
    return write(tmp_path / "checkpoint", {**layer_tensors(1), **layer_tensors(2)}, shards=2)
