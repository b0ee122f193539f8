"""Triton's interpreter with GPUs' bfloat16, and without the work that it repeats for nothing: two thirds of its time.

- Before every call of a device function it replaces the functions of ``triton.language`` by its own, though the launch
  around the call has done so.  Here a launch does it once.
- By six more operations it finds out whether an integer operation overflows, and then asserts it only in a debug mode
  that it does not have.  Here it does not ask.
- Xor along an axis, which `tl.sort` is made of, it computes element by element.  Here numpy does it.

What kernels compute stays the same, but for one thing: float32 becomes bfloat16 as on a GPU, to nearest even.  The
interpreter truncates, and makes other numbers of subnormal ones in both directions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any


def quicken() -> None:
    """Make the interpreter of this process faster; nothing where Triton is not there or does not interpret."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
        _quicken()


@functools.cache
def _quicken() -> None:
    from triton.runtime import interpreter

    # private to Triton: a version that has them otherwise stays as slow as it is
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
    """In place of `_convert_float`: the bits of ``values`` as ``target``, in unsigned integers."""
    import numpy
    import triton.language as tl

    if (source, target) == (tl.bfloat16, tl.float32):
        return values.view(numpy.uint16).astype(numpy.uint32) << 16
    if (source, target) != (tl.float32, tl.bfloat16):
        return otherwise(values, source, target, rounding)
    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    # a NaN's mantissa must neither be carried into the exponent nor lose all its ones
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return numpy.where(nan, (bits >> 16) | 0x40, rounded).astype(numpy.uint16)


def _reduce(operation: Any, otherwise: Any, values: Any) -> Any:
    """In place of `ReduceOps.apply_impl`."""
    import numpy
    import triton.language as tl

    if operation.axis is None or operation.combine_fn is not tl.standard._xor_combine:
        return otherwise(operation, values)
    data = values[0].handle.data
    found = numpy.bitwise_xor.reduce(data, axis=operation.axis, keepdims=operation.keep_dims)
    return operation.to_tensor(found, values[0].dtype)


class _Language:
    """In place of the interpreter's function that replaces the language as the module of a kernel sees it."""

    def __init__(self, replace: Any) -> None:
        import triton.language as tl

        self._replace = replace
        self._modules = (tl, tl.core)
        self._seen: dict[Any, frozenset[int]] = {}
        self._replaced: set[int] = set()
        self._scope: Any = None

    def __call__(self, function: Any) -> _Language:
        """Replace what is not replaced yet; the result's ``restore`` is called by launches alone."""
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
        """Undo what the launch has replaced; what its device functions have added stays, as Triton leaves it."""
        self._replaced.clear()
        self._scope.restore()
