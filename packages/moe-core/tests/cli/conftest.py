"""The command line, in an installation that has the scheme ``plain`` alone."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core.registry import KNOWN_SCHEMES, registry
from moe_core_checkpoints import entry_points, layer_tensors, write
from moe_core_cli.main import main


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


class Moe:
    """``moe(*arguments)`` runs a command in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self.capture = capture

    def __call__(self, *arguments: object) -> Result:
        self.capture.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        out, err = self.capture.readouterr()
        assert "Traceback" not in err
        return Result(code, out, err)

    def refuses(self, *arguments: object, parts: tuple[str, ...] = ()) -> None:
        """Exit code 2, nothing on stdout, one paragraph on stderr that has all ``parts``."""
        result = self(*arguments)
        assert result.code == 2
        assert result.out == ""
        assert result.err.startswith(f"moe {arguments[0]}: ")
        assert "\n\n" not in result.err
        for part in parts:
            assert part in result.err


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
