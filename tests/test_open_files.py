"""A load leaves no file open, also where it fails, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from moe_core import ConfigError, load_layer, registry
from moe_core.checkpoint import Checkpoint
from moe_core.checkpoint.source import read_layer
from moe_core.layer.loading import choose, load_layers
from moe_core.layer.request import LayerRequest, describe

OPEN = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not OPEN.is_dir(), reason="needs /proc")


@pytest.fixture(params=["fp8", "int8"])  # shards with an index; one file
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    registry().scheme(request.param).write_quickstart(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def opened_by(call: Callable[[], Any]) -> int:
    """Number of files that three calls leave open, after one that may import something."""
    call()
    before = len(os.listdir(OPEN))
    for _ in range(3):
        call()
    return len(os.listdir(OPEN)) - before


def test_loads_close_their_files(folder: Path) -> None:
    layer = load_layer(folder, device="cpu")
    there = Checkpoint.open(folder)

    def all_layers(checkpoint: Checkpoint) -> None:
        requests = [LayerRequest(layer=index, device=layer.weights.device) for index in checkpoint.moe_layers]
        assert len([*load_layers(choose(describe(checkpoint, request), request) for request in requests)])

    def broken() -> None:
        with pytest.raises(ConfigError):
            load_layer(folder, device="cpu", experts=[99])

    def impossible() -> None:
        with pytest.raises(ConfigError):
            load_layer(folder, device="cpu", backend="nonsense")

    assert opened_by(lambda: load_layer(folder, device="cpu")) == 0
    assert opened_by(lambda: layer.reload(folder)) == 0
    assert opened_by(lambda: load_layer(there, device="cpu")) == 0
    assert opened_by(lambda: layer.reload(there)) == 0
    assert opened_by(lambda: all_layers(there)) == 0
    assert opened_by(lambda: all_layers(Checkpoint.open(folder))) == 0
    assert opened_by(broken) == 0
    assert opened_by(impossible) == 0


def test_a_tensor_that_is_broken_leaves_no_file_open(folder: Path) -> None:
    sources = []

    def truncated() -> None:
        checkpoint = Checkpoint.open(folder)
        sources.append(read_layer(checkpoint))
        for file in folder.glob("*.safetensors"):
            os.utime(file, (1, len(sources)))
        with pytest.raises(ConfigError.__bases__[0], match="changed"):
            sources[-1].weights()

    assert opened_by(truncated) == 0
