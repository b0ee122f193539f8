"""Files that change while they are open."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moe_core import CheckpointError
from moe_core._support.open_file import FileState, OpenFile
from moe_core.checkpoint import Checkpoint
from moe_core_checkpoints import write
from safetensors.torch import save_file

SIZE = 1000


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def grow(file: Path) -> None:
    with file.open("ab") as out:
        out.write(b"more")


def rewrite(file: Path) -> None:
    content = file.read_bytes()
    time.sleep(0.02)  # times of files have the clock's ticks
    with file.open("r+b") as out:
        out.write(content)


def touch(file: Path) -> None:
    os.utime(file, ns=(0, 0))


CHANGES = {"truncated": truncate, "emptied": empty, "grown": grow, "rewritten": rewrite, "touched": touch}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("before", ["open", "header"])
def test_a_changed_file_is_refused(tmp_path: Path, change: Callable[[Path], None], before: str) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.ones(SIZE), "b": torch.ones(SIZE)}, shards=2))
    file = tmp_path / "model-00001-of-00002.safetensors"
    if before == "header":
        checkpoint.tensor("a")
    change(file)
    for read in (lambda: checkpoint.tensor("a"), lambda: checkpoint.part("a", 7)):
        with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
            read()
    assert torch.equal(checkpoint.tensor("b"), torch.ones(SIZE))


def test_a_replaced_file_is_refused_or_read_as_it_was(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "c", {"a": torch.ones(SIZE), "b": torch.ones(SIZE)}, shards=2))
    checkpoint.tensor("b")
    for name in ("a", "b"):
        other = tmp_path / "other"
        save_file({name: torch.zeros(SIZE)}, other)
        os.utime(other, ns=(0, 0))
        os.replace(other, checkpoint._files[name])
    assert torch.equal(checkpoint.tensor("b"), torch.ones(SIZE))
    with pytest.raises(CheckpointError, match="has changed"):
        checkpoint.tensor("a")


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.ones(SIZE)}, shards=1))
    file = tmp_path / "model-00001-of-00001.safetensors"
    file.unlink()
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        checkpoint.tensor("a")


@pytest.mark.parametrize("by_position", [True, False])
def test_reads_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_position: bool) -> None:
    if not by_position:
        monkeypatch.delattr(os, "preadv")
    (tmp_path / "f").write_bytes(bytes(range(256)))
    file = OpenFile(tmp_path / "f")
    assert file.state == FileState.of(tmp_path / "f")
    assert file.read(250, 6) == bytes(range(250, 256))
    assert file.read(3, 2) == b"\x03\x04"
    assert file.read(256, 0) == b""
    with pytest.raises(CheckpointError, match="truncated: .* 250"):
        file.read(250, 8)


def test_reads_what_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the system returns 2 GB at most."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:3]], at))
    (tmp_path / "f").write_bytes(bytes(range(20)))
    assert OpenFile(tmp_path / "f").read(1, 17) == bytes(range(1, 18))


@pytest.mark.parametrize("most", [None, 5, 1], ids=["whole", "in pieces", "byte by byte"])
@pytest.mark.parametrize("gap", [2, 3])
@pytest.mark.parametrize("together", [1024, 2])
def test_neighbors_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, together: int, gap: int
) -> None:
    content = bytes(range(100))
    (tmp_path / "f").write_bytes(content)
    file = OpenFile(tmp_path / "f")
    calls: list[int] = []
    read = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        calls.append(len(buffers))
        if most is None:
            return read(descriptor, buffers, at)
        return read(descriptor, [buffers[0][:most]], at)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr("moe_core._support.open_file._MOST_BUFFERS", together)
    monkeypatch.setattr("moe_core._support.open_file._GAP", memoryview(bytearray(gap)))
    spans = [(10, 4), (14, 1), (15, 12), (30, 7), (37, 3)]
    buffers = [bytearray(size) for _, size in spans]
    file.read_all((memoryview(buffer), at) for buffer, (at, _) in zip(buffers, spans, strict=True))
    assert [bytes(buffer) for buffer in buffers] == [content[at : at + size] for at, size in spans]
    if most is None:
        # a gap that is read takes a buffer
        assert calls == {(1024, 2): [3, 2], (1024, 3): [6], (2, 2): [2, 1, 2], (2, 3): [2, 2, 2]}[together, gap]
    with pytest.raises(CheckpointError, match=r"truncated: .* 9\d"):
        file.read_all([(memoryview(bytearray(3)), 96), (memoryview(bytearray(4)), 99)])


def test_a_pipe_that_takes_the_place_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.touch()
    state = FileState.of(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="regular file"):
        OpenFile(file, state)
