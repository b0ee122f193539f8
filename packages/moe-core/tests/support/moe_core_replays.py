"""Calls that are recorded where there is no GPU, and what the host does in one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core.jit.launch import Launch


def as_if_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of interpreted kernels are recorded as if those were compiled; what a record starts computes nothing."""
    made = Launch.of

    def of(kernel: Any, grid: Any, args: Any, keywords: Any, compiled: Any = None) -> Launch:
        stand_in = SimpleNamespace(run=lambda *_: None, function=0, packed_metadata=())
        return made(kernel, grid, args, keywords, stand_in)

    monkeypatch.setattr(Launch, "of", staticmethod(of))
    monkeypatch.setattr("moe_core.replay._current_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def python_calls(run: Callable[[], object]) -> int:
    """Functions of Python that ``run()`` calls."""
    count = -1  # run itself

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
