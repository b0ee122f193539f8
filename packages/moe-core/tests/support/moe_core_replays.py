"""Calls that are recorded where there is no GPU, and what the host does in one."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from moe_core.kernels.launch.launch import Launch


def as_if_compiled(monkeypatch: pytest.MonkeyPatch, *, computes: bool = False) -> None:
    """Calls of interpreted kernels are recorded as if those were compiled.

    What a record starts computes nothing, or, with ``computes``, what the kernel does with the memory at the addresses
    that it is started with.
    """
    made = Launch.of

    def of(kernel: Any, grid: Any, args: Any, keywords: Any, compiled: Any = None) -> Launch:
        # as the compiled kernel, what computes nothing keeps no tensor of the launch
        run = _computing(kernel, made(kernel, grid, args, keywords)) if computes else lambda *arguments: None
        stand_in = SimpleNamespace(run=run, function=0, packed_metadata=())
        return made(kernel, grid, args, keywords, stand_in)

    monkeypatch.setattr(Launch, "of", staticmethod(of))
    # what was recorded here is for nobody else
    monkeypatch.setattr("moe_core.kernels.launch.replay._SHARED", {})
    monkeypatch.setattr("moe_core.kernels.launch.replay._current_stream", lambda device: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def _computing(kernel: Any, launch: Launch) -> Callable[..., None]:
    """What the interpreted kernel does, as a compiled one is started; ``launch``: the one that was recorded."""

    def run(gx: int, gy: int, gz: int, *rest: Any) -> None:
        # behind the stream, the function, and what Triton's hooks would get
        values = zip(launch.arguments, launch.arguments.values(), rest[6:], strict=True)
        arguments = {name: _at_address(first, value) for name, first, value in values}
        kernel[gx, gy, gz](**arguments, **launch.options)

    return run


def _at_address(first: Any, value: Any) -> Any:
    """A launcher's argument as the interpreter takes it: ``first`` is what the recorded call gave."""
    if isinstance(first, tuple):
        made = map(_at_address, first, value)
        return type(first)(*made) if hasattr(first, "_fields") else tuple(made)
    if not isinstance(first, torch.Tensor) or not first.numel():
        return first if isinstance(first, torch.Tensor) else value
    last = sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    nbytes = (last + 1) * first.element_size()
    memory = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(value), dtype=torch.uint8)
    return memory.view(first.dtype).as_strided(first.shape, first.stride())


def python_calls(run: Callable[[], object]) -> int:
    """Functions of Python that ``run()`` calls."""
    count = -1  # run itself

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    collects = gc.isenabled()
    gc.disable()  # what is collected meanwhile may call functions too
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count
