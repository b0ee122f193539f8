"""Threads that read a layer's experts give what one gives."""

from __future__ import annotations

import threading
from pathlib import Path

import moe_core as mc
import pytest
import torch
from moe_core.checkpoint import reading_threads
from moe_core.checkpoint.reading_threads import in_threads
from moe_core.checkpoint.safetensors_file import SafetensorsFile

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


def test_modes_of_torch_are_those_of_the_caller() -> None:
    def job(_: int) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    with torch.inference_mode():
        assert set(in_threads(job, 4, MANY)) == {(True, False)}
    assert set(in_threads(job, 4, MANY)) == {(False, False)}


CASES = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "case",
    ["moe-fp8/tests/data/qwen3_ct_fp8_dynamic", "moe-wna16/tests/data/qwen3_awq4_g64"],
    ids=lambda path: path[-12:],
)
def test_a_layer_is_the_same_and_read_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CASES / case
    expected = dict(mc.load_layer(folder, device="cpu").weights.tensors())
    reads: list[str] = []
    original = SafetensorsFile.read_into

    def read_into(self: SafetensorsFile, name: str, out: torch.Tensor, index: int | None = None) -> None:
        reads.append(name)
        original(self, name, out, index)

    monkeypatch.setattr(SafetensorsFile, "read_into", read_into)
    monkeypatch.setattr(reading_threads, "FEWEST_BYTES", 0)
    with torch.inference_mode():
        found = dict(mc.load_layer(folder, device="cpu").weights.tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected)
    weights = [name for name in reads if name.endswith(("weight", "qweight")) and ".experts." in name]
    assert len(weights) == len(set(weights)) > 0
