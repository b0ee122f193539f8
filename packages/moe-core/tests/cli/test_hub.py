"""Models by their name on the Hugging Face Hub, found in its local cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

NAME = "owner/Model-1.5"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, named by no variable yet."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def add(cache: Path, folder: Path, revision: str, *, main: bool = False, age: int = 0) -> Path:
    """``folder`` as a snapshot of :data:`NAME`."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / revision
    shutil.copytree(folder, snapshot)
    os.utime(snapshot, (10**9 - age, 10**9 - age))
    if main:
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(revision)
    return snapshot


@pytest.mark.parametrize(
    ("variable", "value", "place"),
    [
        ("HF_HUB_CACHE", "{}", "."),
        ("HUGGINGFACE_HUB_CACHE", "{}", "."),
        ("HF_HOME", "{}", "hub"),
        ("XDG_CACHE_HOME", "{}", "huggingface/hub"),
        ("HOME", "{}", ".cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(
    moe: Any, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, place: str
) -> None:
    monkeypatch.setenv(variable, value.format(cache))
    snapshot = add(cache / place, folder, "abc", main=True)
    assert moe("explain", NAME, "--device", "cpu", "--json").data["checkpoint"] == str(snapshot)


def test_main_before_others_and_else_the_newest(
    moe: Any, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))

    def found() -> str:
        data = moe("explain", NAME, "--device", "cpu", "--json").data
        return Path(data["checkpoint"]).name

    add(cache, folder, "old", age=9)
    add(cache, folder, "new")
    assert found() == "new"
    add(cache, folder, "main", main=True, age=5)
    assert found() == "main"
    # a ref to a revision that was removed
    (cache / "models--owner--Model-1.5" / "refs" / "main").write_text("../../elsewhere")
    assert found() == "new"


@pytest.mark.parametrize("command", ["run", "explain", "bench", "tune"])
def test_every_command_that_takes_a_folder(
    moe: Any, cache: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    moe.refuses(command, NAME, parts=(str(cache), f"hf download {NAME}"))


def test_a_folder_of_that_name_comes_first(
    moe: Any, folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    add(cache, folder, "abc", main=True)
    shutil.copytree(folder, tmp_path / NAME)
    assert moe("explain", NAME, "--device", "cpu", "--json").data["checkpoint"] == NAME
