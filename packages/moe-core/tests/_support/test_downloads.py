"""Folders that are not, or not wholly, what somebody meant to download."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core.checkpoint import Checkpoint
from moe_core_checkpoints import CONFIG, layer_tensors, write

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4999802720\n"


def refused(path: str | Path, *parts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint = Checkpoint.open(path)
        for name in checkpoint.names:
            checkpoint.info(name)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shards", [0, 2])
@pytest.mark.parametrize("kind", ["config.json", ".safetensors", ".index.json"])
def test_pointers_of_git_lfs(tmp_path: Path, shards: int, kind: str) -> None:
    write(tmp_path, layer_tensors(), shards=shards)
    found = [file for file in tmp_path.iterdir() if file.name.endswith(kind)]
    for file in found:
        file.write_text(POINTER)
    if found:
        refused(tmp_path, f"{kind} is a Git LFS pointer", f"git lfs pull, in {tmp_path}")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3.1"])
def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    folder = name.partition("/")[2]
    refused(name, f"{name} does not exist", f"hf download {name} --local-dir {folder}, and give the folder {folder}")


@pytest.mark.parametrize("name", ["nowhere", "/no/where", "./a/b", "../a", "a/b/c", "a b/c", "-x/y"])
def test_paths_that_are_no_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    # pathlib drops a leading "./"
    assert ("hf download" in refused(name, "does not exist")) == (name == "./a/b")


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path / "snapshots" / "abc", {"a": torch.zeros(1)})
    (tmp_path / "blobs").mkdir()
    refused(tmp_path, "no config.json", f"give one of its snapshots, {tmp_path / 'snapshots' / 'abc'}")


@pytest.mark.parametrize("place", ["beside", "local", "cache"])
@pytest.mark.parametrize("left", ["shards", "index", "config"])
def test_downloads_that_stopped(tmp_path: Path, place: str, left: str) -> None:
    folder = write(tmp_path / "snapshots" / "abc", layer_tensors(), shards=3)
    where = {"beside": folder, "local": folder / ".cache" / "huggingface" / "download", "cache": tmp_path / "blobs"}
    where[place].mkdir(parents=True, exist_ok=True)
    for number in (2, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
        (where[place] / f"blob{number}.incomplete").touch()
    if left != "shards":
        (folder / "model.safetensors.index.json").unlink()
    if left == "config":
        (folder / "config.json").unlink()
    message = refused(folder, "the download is not complete (blob", ".incomplete and 1 more)", "run it again")
    what = "no config.json" if left == "config" else "model-00002-of-00003.safetensors"
    assert what in message
    assert ("(2 of 3 shards are)" in message) == (left == "shards")


def test_shards_that_are_missing_for_another_reason(tmp_path: Path) -> None:
    folder = write(tmp_path, layer_tensors(), shards=3)
    (folder / "model-00003-of-00003.safetensors").unlink()
    message = refused(folder, "names the shard model-00003-of-00003.safetensors (for '", "(1 of 3 shards are)")
    assert "download" not in message


def test_a_folder_that_is_no_file(tmp_path: Path) -> None:
    assert "num_experts" in CONFIG
    write(tmp_path, layer_tensors())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path, "model.safetensors is not a regular file, it is a folder")
