"""Whatever lies where a file is expected: an answer at once, and a MoEError unless it can be read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from moe_core import MoEError
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core_checkpoints import layer_tensors, write

SECONDS = 5


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Ends what waits for a pipe's other end."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names:
        checkpoint.tensor(name)
    read_layer(checkpoint)


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # addresses of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


PLACES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": bind,
    "folder": Path.mkdir,
    "folder with something": lambda path: (path / "config.json").mkdir(parents=True),
    "loop": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to its folder": lambda path: path.symlink_to("."),
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "file of the kernel": lambda path: path.symlink_to("/proc/self/mem"),
    "empty file": Path.touch,
    "a terabyte of nothing": large,
}
FILES = (
    "config.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "hf_quant_config.json",
    "quantize_config.json",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*FILES, "model.safetensors"])
def test_in_place_of_a_file(tmp_path: Path, name: str, place: str) -> None:
    write(tmp_path, layer_tensors(), shards=0 if name == "model.safetensors" else 2)
    (tmp_path / name).unlink(missing_ok=True)
    PLACES[place](tmp_path / name)
    with pytest.raises(MoEError) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_in_place_of_the_folder(tmp_path: Path, place: str) -> None:
    PLACES[place](tmp_path / "c")
    with pytest.raises(MoEError, match=r"/c|" + str(tmp_path)):
        read(tmp_path / "c")


@pytest.mark.parametrize("name", ["a\0b", "a\nb\x1b[2J", "\udcff", "x" * 300, "/" * 5000, "a/" * 2500])
def test_odd_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(MoEError) as caught:
        read(tmp_path / name)
    assert str(caught.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is allowed to root")
@pytest.mark.parametrize("name", [*FILES[:3], "."])
def test_what_may_not_be_read(tmp_path: Path, name: str) -> None:
    write(tmp_path, layer_tensors(), shards=2)
    (tmp_path / name).chmod(0)
    try:
        with pytest.raises(MoEError, match="Permission denied"):
            read(tmp_path)
    finally:
        (tmp_path / name).chmod(0o700)


RACE = """
import itertools, json, os, shutil, sys, threading, time
from pathlib import Path
from moe_core import MoEError
from moe_core.checkpoint import Checkpoint

folder, spare = Path(sys.argv[1]), Path(sys.argv[2])
names = [file.name for file in folder.iterdir()]
end = time.monotonic() + 1.0

def truncated(file):
    os.truncate(file, file.stat().st_size // 3)

def replaced(file):
    shutil.copy(spare / file.name, folder / "next")
    os.replace(folder / "next", file)

def gone(file):
    file.unlink()

def a_pipe(file):
    file.unlink()
    os.mkfifo(file)

def disturb():
    for change, name in itertools.cycle(itertools.product((truncated, replaced, gone, a_pipe), names)):
        change(folder / name)
        time.sleep(0.001)
        replaced(folder / name)
        if time.monotonic() > end:
            return

thread = threading.Thread(target=disturb)
thread.start()
read = refused = 0
while thread.is_alive():
    try:
        checkpoint = Checkpoint.open(folder)
        for name in checkpoint.names:
            for tensor in (checkpoint.tensor(name), checkpoint.part(name, 1)):
                assert bool((tensor == float(name)).all()), name
        read += 1
    except MoEError as error:
        refused += 1
thread.join()
print(read, refused)
"""


def test_folders_that_change_while_they_are_read(tmp_path: Path) -> None:
    """Tensors are right, or there is an error; the process lives."""
    tensors = {str(number): torch.full((4, 1 << 14), float(number)) for number in range(4)}
    write(tmp_path / "c", tensors, shards=2)
    write(tmp_path / "spare", tensors, shards=2)
    signal.alarm(0)
    arguments = [sys.executable, "-c", RACE, str(tmp_path / "c"), str(tmp_path / "spare")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert min(int(count) for count in done.stdout.split()) > 0, done.stdout
