"""Exclusion of MoE computations from ``torch.autocast``.

The dtypes of a layer are part of its number format. Under autocast, plain torch products would run in another dtype,
and scales could leave its range.
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
    """Whether autocast is active for ``x``: for its device, and for its dtype.

    Args:
        x: Any tensor.

    Returns:
        True inside an autocast region for the device of ``x`` if autocast casts from or to the dtype of ``x``.
    """
    kind = x.device.type
    return kind != "meta" and x.dtype in _DTYPES and torch.is_autocast_enabled(kind)


def autocast_off(kind: str) -> contextlib.AbstractContextManager[object]:
    """Make a context that disables autocast for a device type.

    It costs little if autocast is off already.

    Args:
        kind: Device type, e.g. "cuda".

    Returns:
        The context manager.
    """
    # torch has no autocast for the meta device.
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return _NOTHING


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to run without autocast on all device types.

    Args:
        function: The function.

    Returns:
        The decorated function.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.ExitStack() as stack:
            for kind in _KINDS:
                stack.enter_context(autocast_off(kind))
            return function(*args, **kwargs)

    return call
