"""Specialize one device function for several constants or callees.

The tile kernel takes functions as arguments and calls them with a fixed signature, without function-specific constants.
Such a function reads its constants and its callees as names of its module. `specialize` makes copies with other values
of these names:

    BITS = tl.constexpr(4)

    @triton.jit
    def load(state, k): ...             # reads BITS

    load_8 = specialize(load, BITS=8)
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from moe_core.errors import ConfigError
from moe_core.kernels.device.casts import INTERPRET


def specialize(function: Any, **values: Any) -> Any:
    """Copy a `@triton.jit` function, replacing names of its module by other ``values``.

    Numbers, strings and None become constants; a `@triton.jit` function replaces another. Only ``function`` itself sees
    the values, not its callees. Call this once, at import time: Triton compiles separately for each copy.

    Args:
        function: A `@triton.jit` function.
        **values: New values of names that ``function`` reads.

    Returns:
        The specialized `@triton.jit` function.

    Raises:
        ConfigError: If ``function`` does not read one of the names.
    """
    fn = function.fn
    read = set(fn.__code__.co_names) & set(fn.__globals__)
    if not read >= set(values):
        unknown, known = ", ".join(sorted(set(values) - read)), ", ".join(sorted(read))
        raise ConfigError(f"{fn.__qualname__} does not read the global {unknown}; expected some of {known}")
    # in the interpreter, the product with a constant would become a constant
    functions = {name: value for name, value in values.items() if INTERPRET or hasattr(value, "fn")}
    constants = {name: tl.constexpr(value) for name, value in values.items() if name not in functions}
    copy = FunctionType(fn.__code__, fn.__globals__ | functions | constants, fn.__name__, fn.__defaults__)
    copy.__annotations__, copy.__doc__, copy.__module__ = fn.__annotations__, fn.__doc__, fn.__module__
    # Triton distinguishes the functions of a kernel by this name
    said = (value.fn.__qualname__ if hasattr(value, "fn") else str(value) for value in values.values())
    copy.__qualname__ = "_".join((fn.__qualname__, *said)).replace("-", "m")
    made = triton.jit(copy)
    if not INTERPRET:
        made.__name__ = copy.__qualname__
    return made
