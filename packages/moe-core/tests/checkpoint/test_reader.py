from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError, ConfigError
from moe_core._support.open_file import OpenFile
from moe_core.checkpoint import Checkpoint, find_layer, load_stacked
from moe_core.checkpoint.files import safetensors_file
from moe_core.checkpoint.reader import MOST_OPEN
from moe_core_checkpoints import CONFIG, E, K, N, layer_tensors, write
from moe_kit.changes import raw_file, write_index
from safetensors.torch import save_file


def read_everything(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    for name in list(checkpoint.names):
        checkpoint.tensor(name)


def refused(path: Path, *parts: str) -> str:
    """Opening ``path`` fails, with every part in the message."""
    with pytest.raises(CheckpointError) as caught:
        read_everything(path)
    for part in parts:
        assert part in str(caught.value)
    return str(caught.value)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, offset, bytes) of everything that is read."""
    found: list[tuple[str, int, int]] = []
    original = OpenFile.read_all

    def read_all(self: OpenFile, parts: Iterable[tuple[memoryview, int]]) -> None:
        listed = list(parts)
        found.extend((self.path.name, offset, len(buffer)) for buffer, offset in listed)
        original(self, listed)

    monkeypatch.setattr(OpenFile, "read_all", read_all)
    return found


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_reads_every_tensor_exactly(tmp_path: Path, shards: int) -> None:
    tensors = layer_tensors()
    checkpoint = Checkpoint.open(write(tmp_path / "c", tensors, shards=shards))
    assert set(checkpoint.names) == set(tensors)
    for name, tensor in tensors.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape) == (tensor.dtype, tuple(tensor.shape))
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert torch.equal(checkpoint.part(name, 1), tensor[1])
    assert len(checkpoint.files) == max(shards, 1)
    assert repr(checkpoint) == f"Checkpoint({str(tmp_path / 'c')!r})"


DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
]


def test_keeps_dtypes_bit_for_bit(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    tensors = {str(dtype): (codes > 7) if dtype is torch.bool else codes.view(dtype).clone() for dtype in DTYPES}
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    for name, tensor in tensors.items():
        found = checkpoint.tensor(name)
        assert found.dtype is tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert torch.equal(checkpoint.part(name, 1).view(torch.uint8), tensor[1].view(torch.uint8))


def test_reads_scalars_and_empty_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}))
    assert checkpoint.tensor("scalar").item() == 2.5
    assert checkpoint.tensor("empty").shape == (0, 3)
    for name, index in (("scalar", 0), ("empty", 0), ("empty", -1)):
        with pytest.raises(CheckpointError, match=r"\bentry\b"):
            checkpoint.part(name, index)


def test_headers_are_read_without_data(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, layer_tensors(), shards=2))
    assert {name for name, _, _ in reads} == {"config.json", "model.safetensors.index.json"}
    reads.clear()
    name = "model.layers.0.mlp.gate.weight"
    file = checkpoint.info(name).file
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert reads == [(file.name, 0, 8), (file.name, 8, length)]


def test_tensors_on_a_device(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some bytes at a time, which end where no number does."""
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 1001)
    tensors = {"a": torch.randn(7, 300), "b": torch.randn(5).bfloat16(), "c": torch.tensor(2.5), "d": torch.zeros(0, 3)}
    checkpoint = Checkpoint.open(write(tmp_path, tensors))
    for name, expected in tensors.items():
        found = checkpoint.tensor(name, device)
        assert found.device.type == device.type
        assert torch.equal(found.cpu(), expected)


def test_a_part_is_read_alone(tmp_path: Path, reads: list[tuple[str, int, int]]) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.arange(4 * 600.0).reshape(4, 2, 300)}))
    reads.clear()
    assert torch.equal(checkpoint.part("a", 2), torch.arange(1200.0, 1800.0).reshape(2, 300))
    assert [count for _, _, count in reads] == [2 * 300 * 4]


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_read_one_by_one(tmp_path: Path, reads: list[tuple[str, int, int]], stacked: bool) -> None:
    """Straight to their places, without a second copy of the layer, and nothing twice."""
    tensors = layer_tensors()
    if stacked:
        block = "model.layers.0.mlp.experts"
        tensors = {
            f"{block}.{name}": torch.stack([tensors[f"{block}.{e}.{name}.weight"] for e in range(E)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
    layer = find_layer(Checkpoint.open(write(tmp_path, tensors)))
    reads.clear()
    first = load_stacked(layer, ("gate", "up"), "weight", experts=[2, 0], device="cpu")
    assert torch.equal(first[0, N:], layer.tensor(2, "up", "weight"))
    assert torch.equal(first[1, :N], layer.tensor(0, "gate", "weight"))
    assert torch.equal(layer.stacked("up", "weight", [2, 0]), first[:, N:])
    assert {count for name, _, count in reads if name == "model.safetensors"} == {N * K * 2}
    assert len(reads) == 4 + 2 + 2


def test_tensors_are_copies(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.ones(2, 3)}))
    for tensor in (checkpoint.tensor("a"), checkpoint.part("a", 1)):
        tensor.zero_()
    assert torch.equal(checkpoint.tensor("a"), torch.ones(2, 3))


def test_reading_into_what_does_not_fit(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.ones(2, 3)}))
    for out, index in ((torch.empty(3, 2), None), (torch.empty(2, 3).half(), None), (torch.empty(2, 3), 1)):
        with pytest.raises(CheckpointError, match=r"\ba .*\[2, 3\]"):
            checkpoint.read_into("a", out, index)
    with pytest.raises(CheckpointError, match="entry 2"):
        checkpoint.read_into("a", torch.empty(3), 2)


def test_few_of_many_files_are_open_at_a_time(tmp_path: Path) -> None:
    def descriptors() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum(link.startswith(str(tmp_path)) for link in links)

    count = 3 * MOST_OPEN
    folder = write(tmp_path, {str(i): torch.full((3,), float(i)) for i in range(count)}, shards=count)
    checkpoint = Checkpoint.open(folder)

    def right(name: str, checkpoint: Checkpoint = checkpoint) -> bool:
        return bool((checkpoint.tensor(name) == float(name)).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, [*checkpoint.names] * 5))
    assert 0 < descriptors() <= MOST_OPEN
    (folder / "model.safetensors.index.json").unlink()
    without = Checkpoint.open(folder)
    assert descriptors() <= MOST_OPEN
    assert right("7", without)
    del checkpoint, without, right
    assert descriptors() == 0


def test_an_opened_folder_is_pickled_without_its_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.ones(3)}))
    checkpoint.tensor("a")
    assert torch.equal(pickle.loads(pickle.dumps(checkpoint)).tensor("a"), torch.ones(3))


def test_index_wins_over_a_single_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    save_file({"b": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(Checkpoint.open(tmp_path).names) == ["a"]


def test_single_file_wins_over_other_files(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)})
    save_file({"b": torch.ones(1)}, tmp_path / "io.safetensors")
    assert list(Checkpoint.open(tmp_path).names) == ["a"]


def test_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1), "b": torch.ones(1)}, shards=2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert sorted(Checkpoint.open(tmp_path).names) == ["a", "b"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00002.safetensors is missing")


def test_tensor_in_two_files(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    for file in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / file)
    refused(tmp_path, "a is in two files", "one.safetensors and two.safetensors")


def test_symbolic_links_are_followed(tmp_path: Path) -> None:
    """Download caches hold nothing else."""
    blobs = write(tmp_path / "blobs", {"a": torch.ones(3)}, shards=1)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert torch.equal(Checkpoint.open(snapshot).tensor("a"), torch.ones(3))


# ------------------------------------------------------------------ no checkpoint


def test_no_such_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist", "expected a folder")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = write(tmp_path, {"a": torch.zeros(1)}) / "model.safetensors"
    refused(file, "is a file", "folder that holds config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(tmp_path / "pytorch_model.bin", "pickled files are never read")


def test_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "readme.md").touch()
    refused(tmp_path, "is no checkpoint", "no config.json", "it holds readme.md")


def test_folder_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "is no checkpoint", "no *.safetensors", "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl"])
def test_pickles_are_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    class Exploding:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"model.layers.0.mlp.experts.0.up_proj.weight": Exploding()}, tmp_path / name)
    refused(tmp_path, name, "never read", "safe_serialization=True")
    assert not (tmp_path / "exploded").exists()


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"/tmp"


@pytest.mark.parametrize("path", [None, "", 7, b"/tmp", ["a"], BytesPath()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"\bpath .*(folder|os.PathLike)"):
        Checkpoint.open(path)


@pytest.mark.parametrize("index", [True, 0.0, "0", [0], {}])
def test_what_is_no_layer(tmp_path: Path, index: Any) -> None:
    with pytest.raises(ConfigError, match=r"\blayer\b"):
        find_layer(Checkpoint.open(write(tmp_path, layer_tensors())), index)


def test_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 5000), "can't be read")


# ------------------------------------------------------------------ JSON


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "holds a JSON list, expected an object"),
        (b"null", "holds a JSON NoneType"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": {"b": 1, "b": 1}}', "duplicate key 'b'"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
    ids=["empty", "cut", "bytes", "list", "null", "twice", "twice inside", "digits", "deep list", "deep object"],
)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
def test_broken_json(tmp_path: Path, file: str, text: bytes, message: str) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    (tmp_path / file).write_bytes(text)
    refused(tmp_path, file, message)


def test_json_that_is_no_regular_file(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)})
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    refused(tmp_path, "config.json is not a regular file")


# ------------------------------------------------------------------ index


@pytest.mark.parametrize(
    "entry",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/../../b.safetensors",
        "sub/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
    ],
)
def test_index_entry_outside_the_folder(tmp_path: Path, entry: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = write(tmp_path / "c", {"a": torch.zeros(1)}, shards=1)
    write_index(folder, {"a": entry})
    refused(folder, "index.json", "'a'", repr(entry), "outside the folder")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("model-00007.safetensors", "names the shard model-00007.safetensors (for 'a'), which is missing"),
        ("pytorch_model-00001.bin", "never read"),
        ("config.json", "expected a .safetensors file"),
        (7, "is a int, expected a file name"),
        (None, "expected a file name"),
        (["model.safetensors"], "expected a file name"),
    ],
)
def test_index_entry_that_is_no_shard(tmp_path: Path, entry: object, message: str) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    write_index(tmp_path, {"a": entry})
    refused(tmp_path, "index.json", message)


def test_missing_shard_beside_a_whole_model(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)})
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    refused(tmp_path, "which is missing", "remove the index")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}'])
def test_index_without_a_map(tmp_path: Path, content: str) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    refused(tmp_path, "has no weight_map")


def test_index_names_a_tensor_that_its_shard_has_not(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, shards=1)
    write_index(tmp_path, dict.fromkeys(["a", "b"], "model-00001-of-00001.safetensors"))
    checkpoint = Checkpoint.open(tmp_path)
    assert "b" in checkpoint
    with pytest.raises(CheckpointError, match=re.escape("model-00001-of-00001.safetensors holds 'b'")):
        checkpoint.info("b")


def test_two_indices(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)})
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    refused(tmp_path, "several indices")


# ------------------------------------------------------------------ headers


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is truncated: it has 0 bytes"),
        (b"\x01\x02", "is truncated: it has 2 bytes"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "at most 100000000"),
        ((1 << 20).to_bytes(8, "little") + b"{}", "is truncated: its header size is 1048576 bytes, but only 2 follow"),
        (raw_file(b"\x00\x01\x02"), "is not valid JSON"),
        (raw_file(b'{"a": {}, "a": {}}'), "duplicate"),
        (raw_file([]), "holds a JSON list"),
        (raw_file({"a": 7}), "'a' is a int"),
        (raw_file({"a": entry(dtype=7)}, bytes(8)), "dtype 7"),
        (raw_file({"a": entry(shape="2")}, bytes(8)), "shape '2'"),
        (raw_file({"a": entry(shape=[-2])}, bytes(8)), "shape [-2]"),
        (raw_file({"a": entry(shape=[True])}, bytes(8)), "shape [True]"),
        (raw_file({"a": entry(shape=[1 << 70])}, bytes(8)), "shape"),
        (raw_file({"a": entry(shape=[1 << 62, 1 << 62])}, bytes(8)), "the header gives it 8"),
        (raw_file({"a": entry(shape=[1 << 40], offsets=[0, 1 << 42])}, bytes(8)), "is truncated"),
        (raw_file({"a": entry(offsets=[0])}, bytes(8)), "data_offsets [0]"),
        (raw_file({"a": entry(offsets=[8, 0])}, bytes(8)), "expected to start at 0"),
        (raw_file({"a": entry(offsets=[4, 12])}, bytes(12)), "expected to start at 0"),
        (raw_file({"a": entry(shape=[3])}, bytes(8)), "is F32 [3], which is 12 bytes; the header gives it 8"),
        (raw_file({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "'b' is stored at bytes 4 to 12"),
        (raw_file({"a": entry()}, bytes(7)), "is truncated: 'a' ends at byte 8 of the data, the file holds 7"),
        (raw_file({"a": entry()}, bytes(9)), "has 9 bytes of data, but its header describes 8"),
    ],
)
def test_broken_header(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, "model.safetensors", message)


def test_absurd_header_allocates_nothing(tmp_path: Path) -> None:
    import tracemalloc

    (tmp_path / "config.json").write_text("{}")
    for content in (
        (99_999_999).to_bytes(8, "little") + b"{}",
        raw_file({"a": entry(shape=[1 << 34], offsets=[0, 1 << 36])}, bytes(8)),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        tracemalloc.start()
        refused(tmp_path, "truncated")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20


def test_truncated_data(tmp_path: Path) -> None:
    file = write(tmp_path, layer_tensors()) / "model.safetensors"
    content = file.read_bytes()
    for size in (0, 7, 8, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:size])
        refused(tmp_path, "model.safetensors is truncated")


def test_type_that_torch_has_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw_file({"a": entry(dtype="F6_X", offsets=[0, 3])}, bytes(3)))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("a").dtype is None
    with pytest.raises(CheckpointError, match="F6_X"):
        checkpoint.tensor("a")


def test_unknown_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, {"a": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match="'b'"):
        checkpoint.tensor("b")


# ------------------------------------------------------------------ what is said of the quantization


def quantization(folder: Path, **files: object) -> dict[str, Any]:
    write(folder, {"a": torch.zeros(1)}, {}, **files.pop("config", {}))  # type: ignore[arg-type]
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return dict(Checkpoint.open(folder).quantization)


def test_quantization_of_config_files(tmp_path: Path) -> None:
    assert quantization(tmp_path / "none") == {}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert quantization(tmp_path / "config", config={"quantization_config": fp8}) == fp8
    assert quantization(tmp_path / "text", config={"text_config": {"quantization_config": fp8}}) == fp8
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}}
    assert quantization(tmp_path / "modelopt", hf_quant_config=modelopt) == {
        "quant_method": "modelopt",
        "quant_algo": "MXFP8",
    }
    gptq = {"bits": 4, "group_size": 128}
    assert quantization(tmp_path / "gptq", quantize_config=gptq) == {"quant_method": "gptq", **gptq}
    both = quantization(
        tmp_path / "both", config={"quantization_config": {"quant_method": "awq", "bits": 4}}, quantize_config=gptq
    )
    assert both == {"quant_method": "awq", **gptq}


@pytest.mark.parametrize("value", [7, "fp8", [1], True])
def test_quantization_of_the_wrong_type(tmp_path: Path, value: object) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, {"quantization_config": value})
    refused(tmp_path, "quantization_config is a", "expected an object")
    write(tmp_path, {"a": torch.zeros(1)}, {"quantization_config": {"quant_method": [value]}})
    refused(tmp_path, "quant_method is", "expected a name")
