"""Every kernel launch goes through `launch`, so that launches can also be recorded and compiled without a GPU.

    with record() as specimens:
        block_fp8_fused_moe(...)            # on meta tensors: nothing runs
    for specimen in specimens:
        specimen.compile("cuda", 90)

A specimen holds what the launch would have specialised the kernel for: types, constants and divisibility.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

_RECORDING: ContextVar[list[Specimen] | None] = ContextVar("moe_core_recording", default=None)
_OBSERVER: ContextVar[Callable[[Launched], None] | None] = ContextVar("moe_core_observer", default=None)

_TYPES = {
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "launch_pdl", "enable_fp_fusion", "maxnreg")


@dataclass(frozen=True, eq=False)
class Specimen:
    """One specialisation of a kernel, ready to be compiled for any target.

    ``signature`` type of each parameter by name ("constexpr" for constants, nested tuples for tuples); ``constexprs``
    and ``attrs`` by the path of indices of the parameter, as `triton.compiler.ASTSource` takes them.
    """

    name: str
    fn: Any
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Equal for equal specialisations."""
        return repr((self.name, self.signature, self.constexprs, self.attrs, self.options))

    def compile(self, backend: str, arch: int | str) -> Any:
        """Compile for a target that need not be in this machine; `triton.compile`'s result."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kind: Any = ASTSource
        if hasattr(self.fn, "is_gluon") and self.fn.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            kind = GluonASTSource
        source = kind(self.fn, self.signature, self.constexprs, self.attrs)
        target = GPUTarget(backend, arch, 64 if backend == "hip" else 32)
        options = {k: v for k, v in self.options.items() if backend == "cuda" or k != "launch_pdl"}
        return triton.compile(source, target=target, options=options)


@dataclass(frozen=True, eq=False)
class Launched:
    """A launch that was made: Triton's compiled kernel (None from its interpreter), grid and all arguments in order."""

    name: str
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@contextmanager
def observe(observer: Callable[[Launched], None]) -> Iterator[None]:
    """Tell ``observer`` of every launch inside, after it was made."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


@contextmanager
def record() -> Iterator[list[Specimen]]:
    """Collect the launches inside instead of making them."""
    found: list[Specimen] = []
    token = _RECORDING.set(found)
    try:
        yield found
    finally:
        _RECORDING.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, pdl: bool = False, **keywords: Any) -> None:
    """``kernel[grid](*args, **keywords)``, or its record; nothing for an empty grid.

    ``pdl`` adds the constant PDL and lets the launch overlap the end of the kernel before it.
    """
    if 0 in grid:
        return
    keywords.setdefault("enable_fp_fusion", True)  # Triton's default, which is going to change
    if pdl:
        keywords["launch_pdl"] = True
    recording = _RECORDING.get()
    if recording is None:
        compiled = kernel[grid](*args, PDL=pdl, **keywords)
        observer = _OBSERVER.get()
        if observer is not None:
            constants = keywords | {"PDL": pdl}
            rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            observer(Launched(kernel.fn.__name__, compiled, grid, (*args, *rest)))
    else:
        recording.append(_specimen(kernel, args, keywords | {"PDL": pdl}))


def _specimen(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Specimen:
    options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords}
    values = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
    constexprs: dict[tuple[int, ...], Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}

    def describe(value: Any, path: tuple[int, ...], constant: bool) -> Any:
        if constant or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            constexprs[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(describe(item, (*path, i), False) for i, item in enumerate(value))
        if isinstance(value, torch.Tensor):
            attrs[path] = [["tt.divisibility", 16]]
            return "*" + _TYPES[value.dtype]
        if hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
        if isinstance(value, int):
            if value % 16 == 0:
                attrs[path] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        return "fp32"

    signature = {
        name: describe(values[name], (index,), name in constants) for index, name in enumerate(kernel.arg_names)
    }
    return Specimen(kernel.fn.__name__, kernel, signature, constexprs, attrs, options)
