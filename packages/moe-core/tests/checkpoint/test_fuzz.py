"""Mutated folders: CheckpointError or the right tensors, never anything else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_core import CheckpointError, MoEError
from moe_core.checkpoint import Checkpoint, find_layer, read_model
from moe_core.selection.registry import Registry
from moe_core_checkpoints import CONFIG, entry_points, layer_tensors, write
from moe_kit.fuzz import Folder, fuzz
from moe_kit.fuzz.mutations import mutated_header, mutated_json
from moe_kit.fuzz.reading import read_folder
from torch import Tensor

TENSORS = layer_tensors()
HEADER = 8


def read(folder: Path) -> dict[str, Tensor] | None:
    """Every tensor of the folder, None where it is refused; the layer and its description are read as well."""
    try:
        checkpoint = Checkpoint.open(folder)
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    except CheckpointError:
        return None
    try:
        layer = find_layer(checkpoint)
        read_model(layer)
        for projection in layer.projections:
            for suffix in layer.suffixes(projection):
                layer.stacked(projection, suffix, range(layer.num_experts))
    except CheckpointError:
        pass
    return tensors


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("base"), TENSORS, shards=2)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("single"), TENSORS)


@contextmanager
def naming(seed: int) -> Iterator[None]:
    """Failures within say the seed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def check_bytes(tensors: dict[str, Tensor], folder: Path) -> None:
    """What was read are bytes of the files at the place that the header says, in the header's shape and dtype."""
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        length = int.from_bytes(content[:HEADER], "little")
        header = json.loads(content[HEADER : HEADER + length])
        for name, entry in header.items():
            if name not in tensors or name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            data = content[HEADER + length :][begin:end]
            assert list(tensors[name].shape) == entry["shape"]
            assert bytes(tensors[name].contiguous().view(-1).view(torch.uint8).tolist()) == data


def test_mutated_headers(single: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((single / "config.json").read_bytes())
    target = tmp_path / "model.safetensors"
    content = (single / "model.safetensors").read_bytes()
    read_any = 0
    for seed in range(300):
        target.write_bytes(mutated_header(content, random.Random(seed))[0])
        with naming(seed):
            tensors = read(tmp_path)
            if tensors is not None:
                check_bytes(tensors, tmp_path)
                read_any += 1
    assert 0 < read_any < 300


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
def test_mutated_json(base: Path, tmp_path: Path, file: str) -> None:
    for original in base.iterdir():
        (tmp_path / original.name).write_bytes(original.read_bytes())
    content = (base / file).read_bytes()
    read_any = 0
    for seed in range(150):
        (tmp_path / file).write_bytes(mutated_json(content, random.Random(seed))[0])
        with naming(seed):
            tensors = read(tmp_path)
            if tensors is not None:
                assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in tensors.items())
                read_any += 1
    assert read_any


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def any_entry(names: list[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return given(changes=st.dictionaries(st.sampled_from(names), json_values, min_size=1, max_size=3))


@FUZZ
@any_entry([*CONFIG, "text_config", "n_group", "topk_group", "scoring_func", "swiglu_limit", "routed_scaling_factor"])
def test_any_config_entry(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path, TENSORS, {**CONFIG, **changes})
    read(tmp_path)


@FUZZ
@given(weight_map=json_values | st.dictionaries(st.sampled_from(sorted(TENSORS)), json_values, max_size=4))
def test_any_weight_map(tmp_path: Path, weight_map: Any) -> None:
    write(tmp_path, TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read(tmp_path)


@FUZZ
@given(
    header=st.dictionaries(
        st.sampled_from(["__metadata__", *sorted(TENSORS)[:3]]),
        json_values
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "X"]) | json_values,
                "shape": st.lists(st.integers(-1, 1 << 65), max_size=3) | json_values,
                "data_offsets": st.lists(st.integers(-1, 1 << 65), max_size=3) | json_values,
            }
        ),
        max_size=3,
    ),
    data=st.binary(max_size=64),
)
def test_any_header(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(HEADER, "little") + text + data)
    read(tmp_path)


PLAIN = Registry(lambda group: list(entry_points(group=group)))


@pytest.mark.parametrize("shards", [0, 2])
def test_mutated_folders(shards: int, moe_fuzz: range) -> None:
    """Of 16-bit experts, and of shards with an index."""
    folder = Folder(lambda: TENSORS, CONFIG, shards)
    fuzz(f"{shards} shards", folder, moe_fuzz, read=partial(read_folder, plugins=PLAIN))


def test_the_unchanged_folder_reads(base: Path) -> None:
    tensors = read(base)
    assert tensors is not None
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in tensors.items())
    assert issubclass(CheckpointError, MoEError)
