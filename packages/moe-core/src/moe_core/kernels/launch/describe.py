"""Describe what Triton specializes a kernel for: argument properties and compiler options."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

#: (parameter, indices within nested tuples …, value)
Value = tuple[Hashable, ...]


def describe(kernel: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> frozenset[Value]:
    """Return what a Triton kernel is specialized for in a call.

    Kernels of Triton's interpreter are supported too.

    Args:
        kernel: The Triton kernel.
        arguments: Positional arguments.
        keywords: Keyword arguments and compiler options.

    Returns:
        Specialized properties, equal for calls that run the same compiled kernel.
    """
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | dict(keywords)
    values: set[Value] = set()
    # Triton's interpreter stores the decorator's arguments in a mapping
    free = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()
    for name, default, constant in _parameters(kernel.fn):
        values |= _parts((name,), given.pop(name, default), constant=constant, free=name in free)
    return frozenset(values.union(*(_parts((name,), value, constant=True) for name, value in given.items())))


@cache
def _parameters(function: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return (name, default, whether it is a constexpr) of each parameter."""
    return tuple(
        (item.name, item.default, "constexpr" in str(item.annotation))
        for item in inspect.signature(function).parameters.values()
    )


def _parts(name: Value, value: Any, *, constant: bool, free: bool = False) -> set[Value]:
    if type(value).__name__ == "constexpr":  # a constant in a tuple, which Triton wraps
        value, constant = value.value, True
    if not constant and isinstance(value, tuple):
        return {part for i, item in enumerate(value) for part in _parts((*name, i), item, constant=False, free=free)}
    return {(*name, _text(value, constant=constant, free=free))}


def _text(value: Any, *, constant: bool, free: bool) -> str:
    """Describe a value as far as Triton specializes on it; constants completely."""
    # tuples may contain functions and constants too
    constant = constant or hasattr(value, "__name__") or type(value).__name__ == "constexpr"
    if constant or value is None or isinstance(value, bool):
        return _function_name(value) if hasattr(value, "__name__") else repr(value)
    if isinstance(value, int):
        wide = "" if -(2**31) <= value < 2**31 else " of 64 bits"
        if free:
            return f"integer{wide}"
        return "1" if value == 1 else f"multiple of 16{wide}" if value % 16 == 0 else f"integer{wide}"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"{value.base.dtype} {list(value.block_shape)}"
    if hasattr(value, "data_ptr") and not free and value.data_ptr() % 16:
        return f"{value.dtype} anywhere"
    return str(getattr(value, "dtype", type(value).__name__))


def _function_name(value: Any) -> str:
    """Return the qualified name, in which copies by `moe_core.kernels.device.specialize` differ."""
    return str(getattr(getattr(value, "fn", value), "__qualname__", value.__name__))
