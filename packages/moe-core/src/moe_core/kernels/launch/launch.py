"""Every kernel launch goes through `launch`, so that launches can be recorded too.

    with record() as launches:
        block_fp8_fused_moe(...)            # on meta tensors: nothing runs
    print([one.name for one in launches])   # sort_kernel, grouped_gemm_kernel, …

`observe` tells of launches that are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from moe_core.kernels.launch.current_device import current, device_of
from moe_core.kernels.launch.describe import Value, describe

#: Triton's options of a launch, which are no parameters of the kernel
_OPTIONS = frozenset({"num_warps", "num_stages", "num_ctas", "launch_pdl", "enable_fp_fusion", "maxnreg"})


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch: the kernel's name, the grid, and all arguments in the order of the kernel's parameters.

    ``compiled``: Triton's compiled kernel; None from its interpreter, and where the launch was recorded only.
    ``kernel`` is what was launched, ``options`` are Triton's (warps, stages …).
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
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: value for name, value in keywords.items() if name not in _OPTIONS}
        options = {name: value for name, value in keywords.items() if name in _OPTIONS}
        arguments = {name: values[name] for name in kernel.arg_names}
        return Launch(kernel.fn.__name__, grid, arguments, compiled, kernel, options)

    def compiled_for(self) -> tuple[str, frozenset[Value]]:
        """The kernel and what it is compiled for: launches of which these are equal run one compiled kernel."""
        fn = self.kernel.fn
        described = describe(self.kernel, tuple(self.arguments.values()), self.options)
        return f"{fn.__module__}.{fn.__qualname__}", described


#: the launches that are collected instead of made; None: they are made
RECORDING: ContextVar[list[Launch] | None] = ContextVar("moe_core_recording", default=None)
_OBSERVER: ContextVar[Callable[[Launch], None] | None] = ContextVar("moe_core_observer", default=None)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """Collect the launches inside instead of making them."""
    found: list[Launch] = []
    token = RECORDING.set(found)
    try:
        yield found
    finally:
        RECORDING.reset(token)


def is_recording() -> bool:
    """Whether launches are recorded instead of made."""
    return RECORDING.get() is not None


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Tell ``observer`` of every launch inside, after it was made."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **keywords: Any) -> None:
    """``kernel[grid](*args, **keywords)``, or its record; nothing for an empty grid.

    On the device of the tensors.  ``pdl`` adds the constant PDL and lets the launch overlap the end of the kernel
    before it.
    """
    if 0 in grid:
        return
    keywords["PDL"] = pdl
    keywords.setdefault("enable_fp_fusion", True)  # Triton's default, which is going to change
    if pdl:
        keywords["launch_pdl"] = True
    recording = RECORDING.get()
    if recording is not None:
        recording.append(Launch.of(kernel, grid, args, keywords))
        return
    with current(device_of(args)):
        compiled = kernel[grid](*args, **keywords)
    observer = _OBSERVER.get()
    if observer is not None:
        observer(Launch.of(kernel, grid, args, keywords, compiled))
