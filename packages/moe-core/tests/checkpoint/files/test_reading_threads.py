"""Threads that read a layer's experts give what one gives."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe_core as mc
import pytest
import torch
from moe_core._support.open_file import OpenFile
from moe_core.api.models import PER_CALL, ModelSettings, read_layer
from moe_core.checkpoint import Checkpoint, find_layer, load_stacked
from moe_core.checkpoint.experts import stacks
from moe_core.checkpoint.experts.stacks import BadValuesError
from moe_core.checkpoint.experts.values import Values, load_checked
from moe_core.checkpoint.files import reading_threads, staging
from moe_core.checkpoint.files.reading_threads import in_threads, read_ahead
from moe_core.checkpoint.files.staging import Staging
from moe_core_checkpoints import count_reads, expert_tensors, layer_tensors, write
from torch.utils._python_dispatch import TorchDispatchMode

MANY = reading_threads.FEWEST_BYTES


def test_results_are_in_order_and_of_other_threads() -> None:
    together = threading.Barrier(2, timeout=30)

    def job(index: int) -> tuple[int, str]:
        if index < 2:
            together.wait()
        return index, threading.current_thread().name

    found = list(in_threads(job, 9, MANY))
    assert [index for index, _ in found] == list(range(9))
    assert len({name for _, name in found}) > 1
    assert threading.current_thread().name not in {name for _, name in found}


def test_little_is_read_here() -> None:
    found = list(in_threads(lambda _: threading.current_thread(), 3, MANY - 1))
    assert found == [threading.current_thread()] * 3


def test_the_first_error_ends_it() -> None:
    begun: list[int] = []

    def job(index: int) -> None:
        begun.append(index)
        if index == 1:
            raise mc.CheckpointError("broken")
        if index > 1:
            threading.Event().wait(0.01)

    with pytest.raises(mc.CheckpointError, match="broken"):
        list(in_threads(job, 1000, MANY))
    assert len(begun) < 1000
    assert not [t for t in threading.enumerate() if t.name.startswith("moe_core_reader") and t.is_alive()]


def test_all_layers_have_the_same_readers() -> None:
    """Threads that have begun, and what they keep for reading, serve every layer that is read ahead."""
    seen: set[threading.Thread] = set()

    def read(_: int) -> None:
        for _ in range(3):
            seen.update(in_threads(lambda _: threading.current_thread(), 8, MANY))

    list(read_ahead(range(9), read, lambda _, found: found, lambda _: MANY))
    assert 1 < len(seen) <= reading_threads.READERS_AHEAD
    assert not any(thread.is_alive() for thread in seen)


def test_threads_take_the_stream_of_the_callers_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by its number: without one, torch asks whether there are GPUs, which may be hidden by then."""
    taken: list[object] = []
    stream = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", {3: stream}.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "set_stream", taken.append)
    assert list(in_threads(lambda number: number, 2, reading_threads.FEWEST_BYTES)) == [0, 1]
    assert taken[:2] == [stream.device, stream]


def test_modes_of_torch_are_those_of_the_caller() -> None:
    def job(_: int) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert set(in_threads(job, 4, MANY)) == {(True, False)}
    assert set(in_threads(job, 4, MANY)) == {(False, False)}


class Result:
    """What a layer's weights stand for, counted while they exist."""

    def __init__(self, alive: set[int], index: int) -> None:
        self.alive, self.index = alive, index
        alive.add(index)

    def __del__(self) -> None:
        self.alive.discard(self.index)


@pytest.mark.parametrize("nbytes", [0, MANY], ids=["in turn", "ahead"])
def test_layers_are_read_ahead(nbytes: int) -> None:
    """While one is used, the next ones are read, and no more than so many exist."""
    ahead = reading_threads.AHEAD if nbytes else 1
    alive: set[int] = set()
    most, at_once = [0], [0]
    reading = [threading.Event() for _ in range(9)]

    def read(index: int) -> Result:
        reading[index].set()
        return Result(alive, index)

    def use(index: int, result: Result) -> int:
        assert result.index == index
        assert all(one.wait(30) for one in reading[index + 1 : index + ahead])
        at_once[0] += any(one.is_set() for one in reading[index + ahead :])
        most[0] = max(most[0], len(alive))
        return index

    assert list(read_ahead(range(9), read, use, lambda _: nbytes)) == list(range(9))
    assert not alive
    assert not at_once[0]
    assert most[0] <= ahead


@pytest.mark.parametrize("failing", ["read", "use", "close"])
def test_reading_ahead_ends_with_the_first_error(failing: str) -> None:
    read: list[int] = []

    def job(index: int) -> int:
        read.append(index)
        if failing == "read" and index == 3:
            raise mc.CheckpointError("broken")
        return index

    def use(index: int, _: int) -> int:
        if failing == "use" and index == 3:
            raise mc.TensorError("broken")
        return index

    found: list[int] = []
    layers = read_ahead(range(100), job, use, lambda _: MANY)
    if failing == "close":
        found += [next(layers) for _ in range(3)]
        layers.close()
    else:
        with pytest.raises(mc.MoEError, match="broken"):
            found.extend(layers)
    assert len(read) <= 3 + reading_threads.AHEAD
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("moe_core_ahead")]


def test_modes_of_torch_hold_ahead() -> None:
    def read(_: int) -> bool:
        return torch.is_inference_mode_enabled()

    with torch.inference_mode():
        assert list(read_ahead(range(3), read, lambda _, mode: mode, lambda _: MANY)) == [True] * 3


CASES = Path(__file__).parents[4]


#: as stored, transposed, stacked and in turns, with groups of columns
FOLDERS = [
    "moe-fp8/tests/data/qwen3_ct_fp8_dynamic",
    "moe-fp8/tests/data/qwen3_hf_fp8_block",
    "moe-wna16/tests/data/qwen3_awq4_g64",
    "moe-wna16/tests/data/qwen3_gptq4_asym_order_g32",
    "moe-mxfp4/tests/data/gptoss_hf_mxfp4",
]


def canonical(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The canonical weights of a case."""
    weights = read_layer(mc.Checkpoint.open(folder), settings=ModelSettings(routing=PER_CALL)).weights(device)
    return {name: tensor.cpu() for name, tensor in weights.tensors()}


@pytest.mark.parametrize("nbytes", [1, 20_000], ids=["one by one", "a few at a time"])
@pytest.mark.parametrize("case", FOLDERS, ids=lambda path: path.rpartition("/")[2])
def test_a_layer_is_the_same_and_read_once(
    case: str, nbytes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many experts are read at a time, by how many threads, on the CPU or for a GPU."""
    folder = CASES / case
    expected = canonical(folder, torch.device("cpu"))
    reads = count_reads(monkeypatch)
    monkeypatch.setattr(reading_threads, "FEWEST_BYTES", 0)
    monkeypatch.setattr(stacks, "GROUP_BYTES", nbytes)
    with torch.inference_mode():
        found = canonical(folder, device)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    experts = [name for name in reads if ".experts." in name]
    assert experts
    assert {name: reads[name] for name in experts} == dict.fromkeys(experts, 1)


class _Operators(TorchDispatchMode):
    """Counts what torch does, views left out."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class _AsForAGpu:
    """Bytes go through staging memory on their way to the CPU too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group_bytes: int) -> None:
        self.pieces: list[int] = []
        for module in (stacks, staging):
            monkeypatch.setattr(module, "is_staged", lambda _: True)
        monkeypatch.setattr(stacks, "GPU_GROUP_BYTES", group_bytes)
        original = Staging.__init__

        def init(piece: Staging, nbytes: int, *, pinned: bool = False) -> None:
            self.pieces.append(nbytes)
            original(piece, nbytes, pinned=pinned)

        monkeypatch.setattr(Staging, "__init__", init)


@pytest.mark.parametrize("arranged", [1, 50_000, 1 << 20], ids=["each group", "some groups", "all groups"])
@pytest.mark.parametrize("case", FOLDERS, ids=lambda path: path.rpartition("/")[2])
def test_a_layer_through_staging_memory_is_the_same(case: str, arranged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on the way to a GPU is used again for all of a layer's groups, by each thread for itself.

    However many groups are arranged there together.
    """
    monkeypatch.setattr(stacks, "ARRANGED_BYTES", arranged)
    folder = CASES / case
    expected = canonical(folder, torch.device("cpu"))
    monkeypatch.setattr(reading_threads, "FEWEST_BYTES", 0)
    through = _AsForAGpu(monkeypatch, 20_000)
    found = canonical(folder, torch.device("cpu"))
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    assert 0 < len(through.pieces) <= 2 * (reading_threads.READERS + 1)


@pytest.mark.parametrize("arrange", [None, lambda stored: stored.mT], ids=["as stored", "arranged"])
def test_a_group_on_its_way_to_a_gpu_takes_one_copy(
    tmp_path: Path, arrange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each call of torch a thread waits for Python's lock: a group is copied, and looked at with all others."""
    layer = find_layer(Checkpoint.open(write(tmp_path / "c", expert_tensors(experts=64))))
    counts = []
    # the first time makes this thread's pieces of memory, unless another test has
    for groups in (4, 4, 8):
        _AsForAGpu(monkeypatch, layer.nbytes // 3 * 2 // groups + 2 * stacks._ALIGNED)
        with _Operators() as operators:
            load_checked(
                layer,
                ("gate", "up"),
                "weight",
                Values.FINITE,
                experts=range(64),
                device="cpu",
                arrange=arrange,
            )
        counts.append(operators.count)
    assert counts[2] - counts[1] == 4


@pytest.mark.parametrize("arranged", [1, 1 << 20], ids=["each group", "all groups"])
def test_a_refusal_while_a_gpu_arranges_is_raised(
    tmp_path: Path, arranged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that read are waited for; nothing is left of them."""
    layer = find_layer(Checkpoint.open(write(tmp_path / "c", expert_tensors(experts=64))))
    monkeypatch.setattr(reading_threads, "FEWEST_BYTES", 0)
    monkeypatch.setattr(stacks, "ARRANGED_BYTES", arranged)
    _AsForAGpu(monkeypatch, layer.nbytes // 9)

    def refuse(stored: torch.Tensor) -> torch.Tensor:
        raise BadValuesError("", 1, len(stored))

    with pytest.raises(BadValuesError) as caught:
        load_stacked(layer, ("gate", "up"), "weight", experts=range(64), device="cpu", arrange=refuse)
    assert caught.value.stack is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("moe_core_reader")]


def test_a_value_that_is_refused_is_found_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = layer_tensors()
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    tensors[name][1, 3] = float("nan")
    layer = find_layer(Checkpoint.open(write(tmp_path / "c", tensors)))
    arguments = {"experts": [3, 2, 1], "device": "cpu", "check": lambda kept: kept.isnan().any()}
    for nbytes in (1, 1 << 20):
        monkeypatch.setattr(stacks, "GROUP_BYTES", nbytes)
        with pytest.raises(BadValuesError, match=r"experts\.2\.up_proj\.weight .*\(1 of 6") as caught:
            load_stacked(layer, ("gate", "up"), "weight", **arguments)
        assert (caught.value.expert, caught.value.projection) == (2, "up")


@pytest.mark.parametrize("arrange", [None, lambda stored: stored.mT], ids=["as stored", "arranged"])
def test_small_tensors_are_read_together(tmp_path: Path, arrange: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is looked at once for many experts' tensors of all projections."""
    layer = find_layer(Checkpoint.open(write(tmp_path / "c", expert_tensors(experts=64))))
    looks: list[Path] = []
    original = OpenFile.read_all

    def read_all(self: OpenFile, parts: Iterable[tuple[memoryview, int]]) -> None:
        looks.append(self.path)
        original(self, parts)

    monkeypatch.setattr(OpenFile, "read_all", read_all)
    load_stacked(layer, ("gate", "up"), "weight", experts=range(64), device="cpu", arrange=arrange)
    assert len(looks) == 1


@pytest.mark.parametrize("arrange", [None, lambda stored: stored.mT], ids=["as stored", "arranged"])
def test_work_does_not_grow_with_experts(tmp_path: Path, arrange: Any) -> None:
    """What torch does, and a GPU would be told to do, it does for many experts at once."""
    counts = []
    for experts in (4, 64):
        layer = find_layer(Checkpoint.open(write(tmp_path / str(experts), expert_tensors(experts=experts))))
        with _Operators() as operators:
            load_checked(
                layer,
                ("gate", "up"),
                "weight",
                Values.FINITE,
                experts=range(experts),
                device="cpu",
                arrange=arrange,
            )
        counts.append(operators.count)
    assert 0 < counts[0] == counts[1]
