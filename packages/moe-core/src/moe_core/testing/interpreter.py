"""A Triton interpreter with a GPU's bfloat16 rounding that takes a third of the time.

It skips redundant work:

- Triton's interpreter patches ``triton.language`` before every call of a device function, although the launch has
  already done so. Here each launch patches it once.
- It uses six extra operations to detect an integer overflow, which it asserts only in a debug mode that is not
  available. Here the detection is skipped.
- It computes xor along an axis, which `tl.sort` uses, element by element. Here NumPy computes it.

Results of kernels do not change, with one exception: conversion from float32 to bfloat16 rounds to nearest even, as on
a GPU. Triton's interpreter truncates, and changes subnormal numbers in both directions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any


def quicken() -> None:
    """Make the interpreter of this process faster.

    It does nothing if Triton is not installed or the interpreter is not enabled.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        _quicken()


@functools.cache
def _quicken() -> None:
    from triton.runtime import interpreter

    # These names are private to Triton. A version without them keeps its own speed.
    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _Language(interpreter._patch_lang)
    semantic = interpreter.interpreter_semantic
    if hasattr(semantic, "binary_op_sanitize_overflow_impl") and not semantic.builder.options.debug:
        semantic.binary_op_sanitize_overflow_impl = lambda left, right, operation: None
    reduce = interpreter.ReduceOps
    if hasattr(reduce, "apply_impl"):
        reduce.apply_impl = functools.partialmethod(_reduce, reduce.apply_impl)
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = functools.partial(_convert, interpreter._convert_float)


def _convert(otherwise: Any, values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Replace `_convert_float`: return the bits of ``values`` as ``target``, as unsigned ints."""
    import numpy
    import triton.language as tl

    if (source, target) == (tl.bfloat16, tl.float32):
        return values.view(numpy.uint16).astype(numpy.uint32) << 16
    if (source, target) != (tl.float32, tl.bfloat16):
        return otherwise(values, source, target, rounding)
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    # The mantissa of a NaN must not carry into the exponent, and must not become zero.
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(nan, (bits >> 16) | 0x40, rounded).astype(numpy.uint16)


def _reduce(operation: Any, otherwise: Any, values: Any) -> Any:
    """Replace `ReduceOps.apply_impl`."""
    import numpy
    import triton.language as tl

    if operation.axis is None or operation.combine_fn is not tl.standard._xor_combine:
        return otherwise(operation, values)
    data = values[0].handle.data
    found = numpy.bitwise_xor.reduce(data, axis=operation.axis, keepdims=operation.keep_dims)
    return operation.to_tensor(found, values[0].dtype)


class _Language:
    """Replacement of the interpreter function that patches the language in a kernel's module."""

    def __init__(self, replace: Any) -> None:
        import triton.language as tl

        self._replace = replace
        self._modules = (tl, tl.core)
        self._seen: dict[Any, frozenset[int]] = {}
        self._replaced: set[int] = set()
        self._scope: Any = None

    def __call__(self, function: Any) -> _Language:
        """Patch what is not patched yet; only launches call ``restore`` of the result."""
        if function not in self._seen:
            values = function.__globals__.values()
            self._seen[function] = frozenset(i for i, m in enumerate(self._modules) if any(v is m for v in values))
        if not self._replaced or not self._seen[function] <= self._replaced:
            scope = self._replace(function)
            if not self._replaced:
                self._scope = scope
            self._replaced |= self._seen[function]
        return self

    def restore(self) -> None:
        """Undo the patches of the launch; patches added by its device functions stay, as in Triton."""
        self._replaced.clear()
        self._scope.restore()
