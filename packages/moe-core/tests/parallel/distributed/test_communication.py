"""Calls among ranks, without any."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core.parallel.distributed.communication import Communicator


def test_numbers_are_waited_for_on_the_gpu_that_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = torch.device("cuda", 1), list[Any]()
    ready = SimpleNamespace(query=lambda: True)

    def current_stream(device: Any = None) -> Any:
        asked.append(device)
        return SimpleNamespace(record_event=lambda: ready)

    copied = SimpleNamespace(copy_=lambda tensor, non_blocking: torch.tensor([3, 4]))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: copied)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    numbers: Any = SimpleNamespace(is_cuda=True, shape=(2,), dtype=torch.int64, device=gpu)
    group: Any = None
    assert Communicator(group, timedelta(seconds=1)).numbers(numbers, "ranks count") == [3, 4]
    assert asked == [gpu]
