"""Calls that use the same memory on different streams run one after another; streams and events are stand-ins."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from moe_core import ConfigError, Workspace
from moe_core._support.stream_order import StreamOrder
from moe_core_fake_streams import FakeGPU, Memory

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    return FakeGPU(monkeypatch)


@pytest.mark.parametrize("seed", range(20))
def test_each_call_runs_behind_the_one_before_it(seed: int, gpu: FakeGPU) -> None:
    """In a random order of streams, which captures of graphs come between."""
    rng, order, memory = random.Random(seed), StreamOrder(), Memory()
    last: tuple[int, int] | None = None
    expected: int | None = None
    changes = 0
    for _ in range(100):
        if rng.random() < 0.1:
            with gpu.capturing(7):
                order.follow(GPU, memory)
            continue
        number = rng.choice([0, 0, 1, 2])
        with gpu.current(gpu.stream(number)):
            order.follow(GPU, memory)
            assert last is None or gpu.is_behind(last)
            last = gpu.work()
        changes += expected not in (None, number)
        expected = number
    # nothing where the stream stays the same
    assert len(gpu.waits) == len(memory.users) == changes


def test_calls_of_one_stream_wait_for_nothing(gpu: FakeGPU) -> None:
    order = StreamOrder()
    for number in (3, 3, 3):
        with gpu.current(gpu.stream(number)):
            order.follow(GPU)
    assert gpu.waits == []


def test_captured_calls_wait_for_those_of_their_own_graph_alone(gpu: FakeGPU) -> None:
    order = StreamOrder()
    order.follow(GPU)
    for _ in range(2):
        with gpu.capturing(1, 2):
            assert order.follow(GPU)
            first = gpu.work()
            with gpu.current(gpu.stream(2)):
                assert order.follow(GPU)
                assert gpu.is_behind(first)
    assert (2, 1) in gpu.waits
    assert not any(0 in waits for waits in gpu.waits)
    # what was captured has not run: the next call runs behind the last that has
    gpu.waits.clear()
    with gpu.current(gpu.stream(3)):
        assert not order.follow(GPU)
    assert gpu.waits == [(3, 0)]


def test_a_call_that_cannot_wait_for_a_stream_under_capture_is_refused(gpu: FakeGPU) -> None:
    order = StreamOrder()
    with gpu.current(gpu.stream(1)):
        order.follow(GPU)
        last = gpu.work()
    with gpu.capturing(1), gpu.current(gpu.stream(2)), pytest.raises(ConfigError, match="captured"):
        order.follow(GPU)
    # and changed nothing
    with gpu.current(gpu.stream(2)):
        order.follow(GPU)
        assert gpu.is_behind(last)


@pytest.fixture
def workspace(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """One whose memory, which is a CPU's, is taken for a GPU's."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kinds: empty(*size, **kinds))
    users: list[tuple[int, int]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: users.append((self.data_ptr(), stream.number))
    )
    found = Workspace("cuda:0")
    found.users = users  # type: ignore[attr-defined]
    return found


def test_memory_that_grows_is_used_by_one_call_after_another(gpu: FakeGPU, workspace: Any) -> None:
    old = workspace.hold(64)
    with gpu.current(gpu.stream(1)):
        assert workspace.hold(64) is old
        assert workspace.users == [(old.data_ptr(), 1)]
    with gpu.current(gpu.stream(2)):
        # the old memory is kept for its users, and nobody has used the new one
        new = workspace.hold(128)
        assert new is not old
        last = gpu.work()
    assert gpu.waits == [(1, 0)]
    with gpu.current(gpu.stream(1)):
        workspace.hold(128)
        assert gpu.is_behind(last)
    assert workspace.users[1:] == [(new.data_ptr(), 1)]


def test_memory_that_is_reserved_is_of_the_stream_it_is_reserved_on(gpu: FakeGPU, workspace: Any) -> None:
    workspace.reserve(64)
    before = gpu.work()  # by whom the allocator had the memory from
    with gpu.current(gpu.stream(1)):
        workspace.hold(64)
        assert gpu.is_behind(before)


def test_growing_under_capture_waits_for_nothing(gpu: FakeGPU, workspace: Any) -> None:
    workspace.hold(64)
    with gpu.capturing(1):
        captured = workspace.hold(128)
    assert workspace.captured
    with gpu.current(gpu.stream(2)):
        assert workspace.hold(128) is captured
        workspace.hold(256)
    assert gpu.waits == []
    assert workspace._kept == [captured]
