"""What any format reads of a tool's settings is compared wherever the settings stand twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from moe_core import MoEError
from moe_core.checkpoint import Checkpoint, find_layer
from moe_core.checkpoint.config.statements import SETTINGS, tool
from moe_core.selection.registry import registry

PACKAGES = Path(__file__).parents[1] / "packages"
FOLDERS = sorted(path.parent for path in PACKAGES.glob("moe-*/tests/data/*/config.json"))


def compared(method: object) -> set[str]:
    """The entries of a tool's settings that are compared."""
    return {name for setting in SETTINGS if setting.holds_for(tool(method)) for name in setting.names}


class Recorded(dict[str, Any]):
    """Settings that know which of their entries were asked for."""

    def __init__(self, entries: dict[str, Any], asked: set[str]) -> None:
        super().__init__(entries)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_entry_that_a_format_reads_is_compared(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    layer = find_layer(checkpoint)
    asked: set[str] = set()
    settings = Recorded(dict(checkpoint.quantization), asked)
    for scheme in registry().scheme_names():
        for kind in registry().formats(scheme):
            try:
                kind().resolve(settings, layer)
            except MoEError:
                continue
    assert "quant_method" in asked
    assert len(asked) > 1 or checkpoint.quantization["quant_method"] == "mxfp4"
    assert asked <= compared(checkpoint.quantization["quant_method"])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_tools_own_files_agree(folder: Path, tmp_path: Path) -> None:
    """And no longer where one entry of a second file says something else."""
    entries = Checkpoint.open(folder).quantization
    for file in folder.iterdir():
        if file.suffix == ".json" or file.name == "model.safetensors":
            (tmp_path / file.name).symlink_to(file)
    beside = tmp_path / "quantization_config.json"
    beside.write_text(json.dumps(dict(entries)))
    assert Checkpoint.open(tmp_path).quantization == entries
    for name in sorted(compared(entries["quant_method"]) & entries.keys()):
        if isinstance(entries[name], (str, int)):
            other = "acme" if isinstance(entries[name], str) else not entries[name]
            beside.write_text(json.dumps({**entries, name: other}))
            with pytest.raises(MoEError, match=rf"quantization_config.json\.{name} is"):
                Checkpoint.open(tmp_path)
