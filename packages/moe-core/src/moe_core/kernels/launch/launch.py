"""Launch kernels through one function, `launch`, so that launches can also be recorded.

    with record() as launches:
        block_fp8_fused_moe(...)            # on meta tensors: nothing runs
    print([one.name for one in launches])   # sort_kernel, grouped_gemm_kernel, …

`observe` reports each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_core.kernels.launch.current_device import current, device_of, has_several_gpus
from moe_core.kernels.launch.describe import Value, describe

#: Triton's launch options, as opposed to kernel parameters
_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "launch_pdl", "enable_fp_fusion", "maxnreg"})


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    Attributes:
        name: Name of the kernel.
        grid: Launch grid.
        arguments: All arguments, in the order of the kernel's parameters.
        compiled: Triton's compiled kernel; None in the interpreter and for launches that were only recorded.
        kernel: The Triton kernel.
        options: Triton's launch options (warps, stages …).
    """

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    compiled: Any = None
    kernel: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any], compiled: Any = None
    ) -> Launch:
        """Build a launch from the arguments of a kernel call.

        Args:
            kernel: The Triton kernel.
            grid: Launch grid.
            args: Positional arguments.
            keywords: Keyword arguments and launch options.
            compiled: Triton's compiled kernel, if any.

        Returns:
            The launch.
        """
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: value for name, value in keywords.items() if name not in _OPTIONS}
        options = {name: value for name, value in keywords.items() if name in _OPTIONS}
        arguments = {name: values[name] for name in kernel.arg_names}
        return Launch(kernel.fn.__name__, grid, arguments, compiled, kernel, options)

    def compiled_for(self) -> tuple[str, frozenset[Value]]:
        """Return the kernel and its specialization; equal values run the same compiled kernel."""
        fn = self.kernel.fn
        described = describe(self.kernel, tuple(self.arguments.values()), self.options)
        return f"{fn.__module__}.{fn.__qualname__}", described


#: list that collects launches instead of making them; None makes them
RECORDING: ContextVar[list[Launch] | None] = ContextVar("moe_core_recording", default=None)
_OBSERVER: ContextVar[Callable[[Launch], None] | None] = ContextVar("moe_core_observer", default=None)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect the launches within the block instead of making them.

    Yields:
        The list of launches.
    """
    found: list[Launch] = []
    token = RECORDING.set(found)
    try:
        yield found
    finally:
        RECORDING.reset(token)


def is_recording() -> bool:
    """Report whether launches are recorded instead of made."""
    return RECORDING.get() is not None


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Report every launch within the block to ``observer``, after it was made.

    Args:
        observer: Callback for each launch.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


#: stands for a step of the host among the launches that an observer gets
HOST_STEP = Launch("host step", (), {})


def host_step(step: Callable[[], None]) -> None:
    """Run a step of the host between launches, such as a collective.

    A replayed call runs its step in the same place (:meth:`moe_core.kernels.launch.replay.Replay.run`).

    Args:
        step: The step.
    """
    observer = _OBSERVER.get()
    if observer is None:
        step()
        return
    with torch._C.DisableTorchFunction():  # a record repeats what torch does here
        step()
    observer(HOST_STEP)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **keywords: Any) -> None:
    """Run ``kernel[grid](*args, **keywords)`` on the device of the tensors, or record it.

    An empty grid launches nothing.

    Args:
        kernel: The Triton kernel.
        grid: Launch grid.
        *args: Positional arguments of the kernel.
        pdl: Use programmatic dependent launch, which overlaps the end of the previous kernel. Also passed as the
            constant PDL.
        **keywords: Keyword arguments of the kernel and launch options.
    """
    if 0 in grid:
        return
    keywords["PDL"] = pdl
    keywords.setdefault("enable_fp_fusion", True)  # Triton's current default, which is about to change
    if pdl:
        keywords["launch_pdl"] = True
    recording = RECORDING.get()
    if recording is not None:
        recording.append(Launch.of(kernel, grid, args, keywords))
        return
    if has_several_gpus():
        with current(device_of(args)):
            compiled = kernel[grid](*args, **keywords)
    else:
        compiled = kernel[grid](*args, **keywords)
    observer = _OBSERVER.get()
    if observer is not None:
        observer(Launch.of(kernel, grid, args, keywords, compiled))
