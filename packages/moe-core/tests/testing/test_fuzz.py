"""The fuzzer notices what it is for: readers with faults fail, and a sound one does not."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_core import CheckpointError
from moe_kit.changes import raw_file
from moe_kit.fuzz import Fuzzer, Report, Sample, fuzzer, mutated
from moe_kit.fuzz.meaning import allowed_differences, changed_entries, unexplained
from moe_kit.fuzz.reading import MISSING, Layer, stored_tensors

EXPERT = "model.layers.0.mlp.experts.{}.{}.weight"
NAMES = [EXPERT.format(e, p) for e in range(2) for p in ("up_proj", "down_proj")]
DATA = {name: bytes(range(4 * i, 4 * i + 4)) for i, name in enumerate(NAMES)}
HEADER = {name: {"dtype": "U8", "shape": [2, 2], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(NAMES)}
CONFIG: dict[str, Any] = {"num_experts_per_tok": 2, "quantization_config": {"bits": 4, "sym": True}}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": raw_file(HEADER, b"".join(DATA.values())),
}
Reader = Callable[[Path], Layer]


def sound(folder: Path) -> Layer:
    """Refuses whatever is not as it was, but for the number of experts per token and the tensors' bytes."""
    try:
        config = json.loads((folder / "config.json").read_text())
        quantization, top_k = config["quantization_config"], config["num_experts_per_tok"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError("no config") from error
    if quantization != CONFIG["quantization_config"] or [type(v) for v in quantization.values()] != [int, bool]:
        raise CheckpointError("another quantization")
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise CheckpointError("no count")
    tensors = stored_tensors((folder / "model.safetensors").read_bytes()) or {}
    values = {}
    for name, projection in (("w13", "up_proj"), ("w2", "down_proj")):
        own = [tensors.get(EXPERT.format(expert, projection)) for expert in range(2)]
        parts = [list(one.data) for one in own if one is not None and (one.dtype, one.shape) == ("U8", [2, 2])]
        if len(parts) != 2 or any(len(part) != 4 for part in parts):
            raise CheckpointError("other tensors")
        values[name] = torch.tensor(parts, dtype=torch.float64)
    return Layer({"top_k": top_k, "experts": (0, 1)}, values)


def run(folder: Path, read: Reader, seeds: int = 400) -> Report:
    return Fuzzer(Sample("sample", FILES), folder, read).run(range(seeds))


def kinds(report: Report) -> str:
    return "\n".join(map(str, report.failures))


def test_a_sound_reader(tmp_path: Path) -> None:
    report = run(tmp_path, sound)
    assert not report.failures, kinds(report)
    assert sum(report.outcomes.values()) == 400
    assert set(report.outcomes) == {"refused (CheckpointError)", "the same layer", "as the change says"}
    assert min(report.outcomes.values()) > 10


def mixing(layer: Layer) -> Layer:
    return Layer(layer.facts, {**layer.values, "w13": layer.values["w13"] + layer.values["w2"].flip(0)})


def test_experts_that_mix(tmp_path: Path) -> None:
    """A byte of one expert changes another one."""
    report = run(tmp_path, lambda folder: mixing(sound(folder)))
    assert "loads with other w13" in kinds(report)


def test_an_entry_that_is_not_checked(tmp_path: Path) -> None:
    """Whatever ``sym`` is counts as true or false."""

    def careless(folder: Path) -> Layer:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "quantization_config": CONFIG["quantization_config"]})
        )
        layer = sound(folder)
        (folder / "config.json").write_text(json.dumps(config))
        sym = config["quantization_config"].get("sym")
        return Layer({**layer.facts, "weight_key": "symmetric" if sym else "asymmetric"}, layer.values)

    report = Fuzzer(Sample("sample", FILES), tmp_path, careless).run(range(400))
    assert "loads with other weight_key by sym" in kinds(report)


def test_another_error(tmp_path: Path) -> None:
    def raising(folder: Path) -> Layer:
        json.loads((folder / "config.json").read_text())
        return sound(folder)

    report = run(tmp_path, raising)
    assert "JSONDecodeError at decoder.py" in kinds(report)
    assert report.outcomes["failed"] > len(report.failures)


def test_a_reading_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzer, "SECONDS", 1)

    def slow(folder: Path) -> Layer:
        layer = sound(folder)
        while layer.facts["top_k"] != 2:
            time.sleep(0.01)
        return layer

    seed = next(
        s for s in range(1000) if run_one(tmp_path, s)[0] == "as the change says" and changes_top_k(tmp_path, s)
    )
    report = Fuzzer(Sample("sample", FILES), tmp_path, slow).run([seed])
    assert "time: more than 1 s, at" in kinds(report)


def run_one(folder: Path, seed: int) -> tuple[str, object]:
    return Fuzzer(Sample("sample", FILES), folder, sound).one(seed)


def changes_top_k(folder: Path, seed: int) -> bool:
    files, _ = Fuzzer(Sample("sample", FILES), folder, sound).mutation(seed)
    return files["config.json"] != FILES["config.json"]


def test_memory_and_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        sizes = iter(range(0, 100_000, 300))
        patched.setattr(fuzzer, "_megabytes", lambda: float(next(sizes)))
        assert "memory: the process grew by 300 MB" in kinds(run(tmp_path / "a", sound, 64))

    def talkative(folder: Path) -> Layer:
        try:
            return sound(folder)
        except CheckpointError:
            raise CheckpointError("x" * 20_000) from None

    assert "message: an error of 10020 characters" in kinds(run(tmp_path / "b", talkative, 20))


def test_the_first_change_alone_is_told_of(tmp_path: Path) -> None:
    """Where it does the same as both."""

    def careless(folder: Path) -> Layer:
        if b'"bits": 4' not in (folder / "config.json").read_bytes():
            raise KeyError("bits")
        return sound(folder)

    one = Fuzzer(Sample("sample", FILES), tmp_path, careless)
    told = [(one.mutation(s)[1], one.one(s)[1]) for s in range(1000)]
    pairs = [(changes, failure.changes) for changes, failure in told if failure is not None and len(changes) == 2]
    assert any(found == changes[:1] for changes, found in pairs)
    assert any(found == changes for changes, found in pairs)


def test_a_seed_stands_for_a_change(tmp_path: Path) -> None:
    one = Fuzzer(Sample("sample", FILES), tmp_path / "a", sound)
    other = Fuzzer(Sample("sample", FILES), tmp_path / "b", sound)
    for seed in range(100):
        assert one.mutation(seed) == other.mutation(seed)
    assert len({str(one.mutation(seed)) for seed in range(100)}) > 90


def test_every_mutation_changes_one_file() -> None:
    rng, unchanged = random.Random(0), 0
    for _ in range(500):
        files, what = mutated(FILES, rng)
        changed = {name for name in files | FILES if files.get(name) != FILES.get(name)}
        assert len(changed) <= 1
        assert all(what.startswith(f"{name}: ") for name in changed)
        unchanged += not changed
    assert unchanged < 50


# ------------------------------------------------------------------ what a change may mean


def allowed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    old, new = ({"config.json": json.dumps(content).encode()} for content in (before, after))
    return allowed_differences(old, new, 2)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 3}, {"top_k"}),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": "3"}, set()),
        ({"bits": 4}, {"bits": 8}, set()),
        ({"a": {"input_activations": {"symmetric": True}}}, {"a": {"input_activations": {"symmetric": 1}}}, set()),
        ({"a": {"weights": {"symmetric": True}}}, {"a": {"weights": {"symmetric": False}}}, set()),
        ({"checkpoint_format": "gptq"}, {}, {"values"}),
        ({"checkpoint_format": "gptq"}, {"checkpoint_format": "marlin"}, set()),
    ],
)
def test_what_entries_mean(before: dict[str, Any], after: dict[str, Any], expected: set[str]) -> None:
    assert allowed(before, after) == expected


def test_contradictions_mean_nothing() -> None:
    """Neither in one file nor in two."""
    both = {"quantization_config": {"checkpoint_format": "gptq", "format": "gptq"}}
    other = {"quantization_config": {"checkpoint_format": "gptq_v2", "format": "gptq"}}
    assert allowed(both, other) == set()
    assert allowed(both, {"quantization_config": {"checkpoint_format": "gptq_v2", "format": "GPTQ_v2"}}) == {"values"}
    one = {"config.json": json.dumps({"quantization_config": {"format": "gptq"}}).encode()}
    beside = {**one, "quantize_config.json": b'{"checkpoint_format": "gptq_v2"}'}
    assert allowed_differences(one, beside, 2) == set()
    beside = {**one, "quantize_config.json": b'{"checkpoint_format": "gptq"}'}
    assert allowed_differences(one, beside, 2) == {"values"}


def test_changed_entries() -> None:
    old, new = {"a": {"b": 1, "c": [1, 2]}, "d": None}, {"a": 3, "d": None, "e": [{"f": True}]}
    found = dict(changed_entries(json.dumps(old).encode(), json.dumps(new).encode()))
    assert found[("a",)] == 3
    assert found["a", "b"] == found["a", "c"] == MISSING
    assert found["e", "0", "f"] is True
    assert ("d",) not in found
    gone = dict(changed_entries(json.dumps(old).encode(), b'{"d": null}'))
    assert gone[("a",)] == MISSING


def test_what_tensors_mean() -> None:
    header = json.loads(json.dumps(HEADER))
    header["other"] = header.pop(NAMES[2])
    files = {**FILES, "model.safetensors": raw_file(header, b"".join(DATA.values()))}
    assert allowed_differences(FILES, files, 2) == set()
    data = bytearray(b"".join(DATA.values()))
    data[5] ^= 1
    found = allowed_differences(FILES, {**FILES, "model.safetensors": raw_file(HEADER, bytes(data))}, 2)
    assert "w2[0]" in found
    assert unexplained({"w2[0]", "w2[1]", "w13[0]", "top_k"}, found) == {"w2[1]", "w13[0]", "top_k"}


def test_options(moe_fuzz: range, request: pytest.FixtureRequest) -> None:
    start, count = (request.config.getoption(name) for name in ("--moe-fuzz-start", "--moe-fuzz"))
    assert moe_fuzz == range(start, start + count)
