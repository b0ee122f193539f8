"""Compiling Triton kernels for a GPU that is not in this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from moe_core.errors import ConfigError
from moe_core.spec.device import DeviceInfo


@dataclass(frozen=True)
class Target:
    """An architecture to compile for."""

    device: DeviceInfo

    @staticmethod
    def parse(name: str) -> Target:
        """``sm80`` … ``sm120``, ``gfx942``, ``gfx950``; raises ConfigError for what Triton does not compile for."""
        device = DeviceInfo.parse(name)
        if device.kind not in ("cuda", "hip"):
            raise ConfigError(f"Triton kernels are compiled for NVIDIA and AMD GPUs, not for {name}")
        return Target(device)

    def gpu_target(self) -> Any:
        """Triton's name of it."""
        from triton.backends.compiler import GPUTarget

        if self.device.kind == "cuda":
            return GPUTarget("cuda", self.device.capability, 32)
        return GPUTarget("hip", self.device.arch, 64)


class _Driver:
    """Stands in for Triton's driver of a GPU: answers what compiling asks, and has no device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: a name of its own for each target keeps them apart
        return str(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def refuse_interpreter() -> None:
    """Raise ConfigError where Triton was told to interpret kernels: there would be nothing to compile."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 is set: kernels would be interpreted; unset it to compile them")


@contextlib.contextmanager
def launching(target: Target, start: Callable[..., Any]) -> Iterator[None]:
    """Within the block, launching a Triton kernel calls ``start(kernel, arguments, keywords)`` in place of a GPU."""
    refuse_interpreter()
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return start(self, args, kwargs)

    # the property would look for a GPU
    before, launch = driver._active, JITFunction.run
    driver.set_active(_Driver(target.gpu_target()))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch
        driver.set_active(before)


@contextlib.contextmanager
def compiling_for(target: Target, only: Collection[int] | None = None) -> Iterator[list[tuple[str, Any]]]:
    """Within the block, launching a Triton kernel compiles it for ``target`` and starts nothing.

    Yields a list that receives (kernel name, compiled kernel) of each launch, or of those whose numbers, from 0 in
    the order of the launches, are in ``only``; the others do nothing.
    """
    from triton.runtime.jit import JITFunction

    launch, numbers = JITFunction.run, itertools.count()
    compiled: list[tuple[str, Any]] = []

    def start(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if only is not None and next(numbers) not in only:
            return None
        result = launch(kernel, *arguments, grid=(1,), warmup=True, **keywords)
        compiled.append((kernel.__name__, result))
        return result

    with launching(target, start):
        yield compiled
