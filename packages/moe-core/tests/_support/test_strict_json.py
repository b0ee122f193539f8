"""What a config, an index or a header may be, measured by what real ones are."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_core._support.strict_json import (
    MAX_CONFIG_BYTES,
    MAX_DEPTH,
    MAX_INDEX_BYTES,
    MAX_VALUES,
    load_object,
    parse_object,
)
from moe_core.checkpoint import Checkpoint, read_layer
from moe_core_checkpoints import layer_tensors, write
from moe_kit.changes import write_index


def refused(text: bytes, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_object(text, "f.json")
    for part in ("f.json", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("file", "limit"), [("config.json", MAX_CONFIG_BYTES), ("model.safetensors.index.json", MAX_INDEX_BYTES)]
)
def test_larger_than_any_real_file(tmp_path: Path, file: str, limit: int) -> None:
    """Refused by its size, without being read."""
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    with (tmp_path / file).open("wb") as out:
        out.truncate(limit + 1)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=rf"{file} .*\b{limit}"):
        Checkpoint.open(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'""'])
def test_more_values_than_any_real_file(value: bytes) -> None:
    """Each takes 30 times its bytes in memory."""
    text = b'{"a": [' + (value + b",") * MAX_VALUES + b"0]}"
    tracemalloc.start()
    refused(text, f"{len(text)} bytes", f"at most {MAX_VALUES} values")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_index_of_a_large_model(tmp_path: Path) -> None:
    """Two layers of Kimi K2 with int4 experts: 60 of them fit twice."""
    names = (
        f"language_model.model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight_{part}"
        for layer in (59, 60)
        for expert in range(384)
        for matrix in ("gate", "up", "down")
        for part in ("packed", "scale", "shape")
    )
    weight_map = dict.fromkeys(names, "model-00001-of-000062.safetensors")
    folder = write(tmp_path, layer_tensors(), shards=1)
    write_index(folder, weight_map)
    file = folder / "model.safetensors.index.json"
    assert load_object(file, most=MAX_INDEX_BYTES) == {"weight_map": weight_map}
    assert 2 * 30 * file.stat().st_size < MAX_INDEX_BYTES
    assert 2 * 30 * len(weight_map) < MAX_VALUES


def nested(levels: int) -> bytes:
    """An object of so many levels; brackets and quotes inside of strings are no levels."""
    inner = json.dumps(["]}[[{{" * 100, '"[[[[', "\\"]).encode()
    return b'{"a":' * (levels - 1) + inner + b"}" * (levels - 1)


def test_depth() -> None:
    assert parse_object(nested(MAX_DEPTH), "f.json")
    refused(nested(MAX_DEPTH + 1), "nested too deeply", f"at most {MAX_DEPTH} levels")


@pytest.mark.parametrize("ends", [b"{}", b'{"]]}}": "[[{{"}', b'[{"a": [0]}, {}]'])
def test_depth_without_escapes(ends: bytes) -> None:
    """Brackets inside of strings make nothing shallower: those that close stand before those that open."""

    def text(levels: int) -> bytes:
        return b'{"]}": ["}]", ' * levels + ends + b', "[{"]}' * levels

    assert parse_object(text(MAX_DEPTH // 2 - 2), "f.json")
    refused(text(MAX_DEPTH // 2 + 1), "nested too deeply")


@pytest.mark.parametrize("text", [b'"' + b"a" * 10**6, b'{"' + b'\\"' * 10**6, b"]" * 10**6, b"\\" * 10**6])
def test_broken_texts_take_linear_time(text: bytes) -> None:
    start = time.perf_counter()
    refused(text, "is not valid JSON")
    assert time.perf_counter() - start < 5


def test_infinity_where_nobody_asks_for_it(tmp_path: Path) -> None:
    """Configs of hybrid models hold it."""
    folder = write(tmp_path, layer_tensors(), time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (folder / "config.json").read_text()
    assert Checkpoint.open(folder).moe_layers == (0,)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, [10**400]])
@pytest.mark.parametrize("key", ["swiglu_limit", "routed_scaling_factor", "num_experts", "moe_intermediate_size"])
def test_numbers_that_are_none(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_layer(Checkpoint.open(write(tmp_path, layer_tensors(), **{key: value})))
