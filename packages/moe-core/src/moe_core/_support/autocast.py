"""``torch.autocast`` has no effect on products here: a layer's dtypes are part of its number format.

Inside a region where it is on, plain torch products would run in another dtype, and scales could leave its range.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = ("cpu", "cuda", "xpu")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOTHING = contextlib.nullcontext()


def is_autocast(x: Tensor) -> bool:
    """Whether ``x`` is of a dtype that a region of autocast gives and takes, within one for its device."""
    kind = x.device.type
    return kind != "meta" and x.dtype in _DTYPES and torch.is_autocast_enabled(kind)


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
