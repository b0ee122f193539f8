"""Memory that GPUs share among layers: growing with the calls, and what happens where it can't be had."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from moe_core import ConfigError
from moe_core.errors import CommunicationError, FallbackWarning
from moe_core.kernels.ops.exchange import ExchangeShape
from moe_core.kernels.ops.token_layout import TokenCode
from moe_core.parallel.distributed import symmetric
from moe_core.parallel.distributed.symmetric import ExchangeBuffers, ExchangeRoom
from moe_core_exchange import buffers_of
from moe_core_fake_streams import FakeGPU

CPU = torch.device("cpu")


def test_shared_memory_grows_with_the_calls(monkeypatch):
    made = []

    def connect(shape, nbytes, count, ranks, device):
        made.append(nbytes)
        return [replace(buffers_of(shape, "cpu")[0], memory=torch.zeros(nbytes, dtype=torch.uint8))], None

    monkeypatch.setattr(symmetric, "_connect", connect)
    monkeypatch.setattr(symmetric, "_told", lambda ranks, mine: [mine] * 2)
    room, ranks = ExchangeRoom(torch.device("cpu")), SimpleNamespace(synchronize=lambda *_: None)
    small, large = (ExchangeShape(2, tokens, 256, 2, torch.bfloat16) for tokens in (100, 20_000))
    code = TokenCode(256, torch.bfloat16)
    first, buffer = room.take(ranks, small, code)
    second, _ = room.take(ranks, small, code)
    assert (first, second, buffer.shape) == (0, 1, replace(small, results_room=2**23))
    room.release(first)
    monkeypatch.setattr(symmetric, "_capturing", lambda device: True)
    assert room.take(ranks, small, code)[0] == first
    room.release(first)
    with pytest.raises(ConfigError, match="CUDA graph"):
        room.take(ranks, large, code)
    monkeypatch.setattr(symmetric, "_capturing", lambda device: False)
    assert room.take(ranks, large, code)[1].memory.shape[0] >= large.nbytes
    assert made == [256 + size for size in (2**24, 2**24, 2**26)]  # signals; results and tokens
    # a graph goes on using the one that it was captured with
    assert room.nbytes == sum(made)
    room.release(first)
    for _ in range(symmetric.MOST_CALLS - 1):
        room.take(ranks, small, code)
    assert len(made) == 3 + symmetric.MOST_CALLS - 2
    with pytest.raises(ConfigError, match="8 calls"):
        room.take(ranks, small, code)


def test_a_buffer_is_taken_behind_the_call_before_on_another_stream(monkeypatch):
    gpu = FakeGPU(monkeypatch)
    buffers = ExchangeBuffers([SimpleNamespace(memory=SimpleNamespace(device=torch.device("cuda", 1)))])
    buffers.release(buffers.take())
    buffers.release(buffers.take())
    assert gpu.waits == []
    gpu.now = gpu.stream(1)
    buffers.release(buffers.take())
    assert gpu.waits == [(1, 0)]
    # a capture is not ordered with work outside it
    gpu.now = gpu.stream(2)
    gpu.now.capture = object()
    buffers.release(buffers.take())
    gpu.now = gpu.stream(1)
    buffers.release(buffers.take())
    assert gpu.waits == [(1, 0)]


class Group:
    """What weak references can be to."""


def test_layers_of_a_group_share_a_room_which_goes_with_them(monkeypatch):
    asked, made = [], []

    def connect(shape, nbytes, count, ranks, device):
        made.append(nbytes)
        return [replace(buffers_of(shape, "cpu")[0], memory=torch.zeros(nbytes, dtype=torch.uint8))], None

    monkeypatch.setattr(symmetric, "reasons_against", lambda groups, device, own: asked.append(device) or [])
    monkeypatch.setattr(symmetric, "_connect", connect)
    monkeypatch.setattr(symmetric, "_told", lambda ranks, mine: [mine] * 2)
    ranks = SimpleNamespace(group=Group(), members=[0, 1])
    first = ExchangeRoom.connect(ranks, None, CPU)
    assert ExchangeRoom.connect(ranks, None, CPU) is copy.deepcopy(first) is first
    assert len(asked) == len(made) == 1
    # another rank has none any more
    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "_told", lambda ranks, mine: [mine, False if mine is True else mine])
        second = ExchangeRoom.connect(ranks, None, CPU)
    assert second is not first
    assert ExchangeRoom.connect(ranks, None, CPU) is second
    assert len(asked) == len(made) == 2
    del first, second
    gc.collect()
    assert ExchangeRoom.connect(ranks, None, CPU) is not None
    assert len(asked) == len(made) == 3
    known = len(symmetric._ROOMS)
    del ranks
    gc.collect()
    assert len(symmetric._ROOMS) == known - 1


@pytest.mark.parametrize("where", ["other hosts", "here", "on another rank"])
def test_without_shared_memory_torch_sends_tokens_on_all_ranks(where, monkeypatch):
    def connect(*_):
        if where == "here":
            raise CommunicationError("GPUs map each other's memory, and this did not end", details="no permission")
        return buffers_of(ExchangeShape(2, 1, 1, 1, torch.bfloat16), "cpu")[:1], None

    reasons = ["its ranks are on 2 hosts"] if where == "other hosts" else []
    monkeypatch.setattr(symmetric, "reasons_against", lambda *_: reasons)
    monkeypatch.setattr(symmetric, "_connect", connect)
    monkeypatch.setattr(symmetric, "_told", lambda ranks, mine: [mine, "no permission" if where != "here" else ""])
    ranks = SimpleNamespace(group=Group(), members=[0, 1])
    if reasons:  # as it always is between hosts: nothing to warn of
        assert ExchangeRoom.connect(ranks, None, CPU) is None
    else:
        with pytest.warns(FallbackWarning, match="permission"):
            assert ExchangeRoom.connect(ranks, None, CPU) is None
    monkeypatch.setattr(symmetric, "reasons_against", None)  # not asked again
    assert ExchangeRoom.connect(ranks, None, CPU) is None
