"""Cross-compile Triton kernels for a GPU that is not in this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from moe_core.errors import ConfigError
from moe_core.spec.device import DeviceInfo


@dataclass(frozen=True)
class Target:
    """Architecture to compile for.

    Attributes:
        device: The device.
    """

    device: DeviceInfo

    @staticmethod
    def parse(name: str) -> Target:
        """Parse the name of an architecture.

        Args:
            name: ``sm80`` … ``sm120``, ``gfx942`` or ``gfx950``.

        Returns:
            The target.

        Raises:
            ConfigError: If Triton does not compile for the architecture.
        """
        device = DeviceInfo.parse(name)
        if device.kind not in ("cuda", "hip"):
            raise ConfigError(f"Triton kernels are compiled for NVIDIA and AMD GPUs, not for {name}")
        return Target(device)

    def gpu_target(self) -> Any:
        """Return Triton's ``GPUTarget``."""
        from triton.backends.compiler import GPUTarget

        if self.device.kind == "cuda":
            return GPUTarget("cuda", self.device.capability, 32)
        return GPUTarget("hip", self.device.arch, 64)


class _Driver:
    """Stand-in for Triton's GPU driver: answers the queries of the compiler without a device."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # Triton caches compiled kernels by device: a distinct name for each target keeps them apart
        return str(self.target)

    def get_current_stream(self, device: str) -> int:
        return 0


def refuse_interpreter() -> None:
    """Raise ConfigError if Triton's interpreter is enabled: nothing would be compiled."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError("TRITON_INTERPRET=1 is set: kernels would be interpreted; unset it to compile them")


@contextlib.contextmanager
def launching(target: Target, start: Callable[..., Any]) -> Iterator[None]:
    """Redirect Triton launches within the block to a callback.

    Args:
        target: Architecture that Triton sees as the current device.
        start: Called as ``start(kernel, arguments, keywords)`` for each launch.

    Raises:
        ConfigError: If Triton's interpreter is enabled.
    """
    refuse_interpreter()
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return start(self, args, kwargs)

    # the public property would query a GPU
    before, launch = driver._active, JITFunction.run
    driver.set_active(_Driver(target.gpu_target()))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch
        driver.set_active(before)


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[list[tuple[str, Any]]]:
    """Compile the kernels launched within the block for ``target``, without running them.

    Args:
        target: Architecture to compile for.

    Yields:
        A list that receives (kernel name, compiled kernel) for each launch.
    """
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    compiled: list[tuple[str, Any]] = []

    def start(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        result = launch(kernel, *arguments, grid=(1,), warmup=True, **keywords)
        compiled.append((kernel.__name__, result))
        return result

    with launching(target, start):
        yield compiled
