"""``torch.autocast`` has no effect here: a layer's dtypes are part of its number format.

Inside a region where it is on, plain torch products would run in another dtype, and scales could leave its range.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = ("cpu", "cuda", "xpu")
_NOTHING = contextlib.nullcontext()


def autocast_off(kind: str) -> contextlib.AbstractContextManager[object]:
    """A context in which tensors of a device of that ``kind`` keep their dtypes; costs little where they do anyway."""
    # torch knows no autocast of meta tensors
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, in which autocast has no effect, whatever device its tensors are on."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for kind in _KINDS:
                stack.enter_context(autocast_off(kind))
            return function(*args, **kwargs)

    return call
