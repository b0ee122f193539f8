"""Device functions that differ in a constant, or in a function that they call, are written once.

The tile kernel gets functions, which take what the kernel gives them and no constants of their own.  Such a function
reads its constants, and what it calls, as names of its module; `specialize` makes copies with other values of them:

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
    """A copy of a `@triton.jit` function in which names of its module stand for other ``values``.

    Numbers, texts and None become constants; a `@triton.jit` function takes the place of another.  Only ``function``
    itself reads them, not what it calls.  Made once, where a module is imported: Triton compiles for each copy.
    Raises ConfigError for a name that ``function`` does not read.
    """
    fn = function.fn
    read = set(fn.__code__.co_names) & set(fn.__globals__)
    if not read >= set(values):
        unknown, known = ", ".join(sorted(set(values) - read)), ", ".join(sorted(read))
        raise ConfigError(f"{fn.__qualname__} reads no {unknown} of its module, expected some of {known}")
    # in the interpreter, what a constant multiplies would become a constant
    functions = {name: value for name, value in values.items() if INTERPRET or hasattr(value, "fn")}
    constants = {name: tl.constexpr(value) for name, value in values.items() if name not in functions}
    copy = FunctionType(fn.__code__, fn.__globals__ | functions | constants, fn.__name__, fn.__defaults__)
    copy.__annotations__, copy.__doc__, copy.__module__ = fn.__annotations__, fn.__doc__, fn.__module__
    # the name by which Triton tells the functions of a kernel apart
    said = (value.fn.__qualname__ if hasattr(value, "fn") else str(value) for value in values.values())
    copy.__qualname__ = "_".join((fn.__qualname__, *said)).replace("-", "m")
    made = triton.jit(copy)
    if not INTERPRET:
        made.__name__ = copy.__qualname__
    return made
