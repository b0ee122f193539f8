"""Make the GPU of the tensors the current device.

Triton and other just-in-time compilers launch on the current device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def is_elsewhere(device: torch.device) -> bool:
    """Report whether ``device`` is a GPU other than the current one.

    Args:
        device: A device.

    Returns:
        Whether it is a GPU, and not the current one.
    """
    return device.type == "cuda" and device.index != torch.cuda.current_device()


@functools.cache
def has_several_gpus() -> bool:
    """Report whether a tensor may be on another GPU than the current one."""
    return torch.cuda.device_count() > 1


def current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which ``device`` is the current GPU; cheap if it already is.

    Args:
        device: A device; None or a CPU changes nothing.

    Returns:
        A context manager.
    """
    return _NOTHING if device is None or not is_elsewhere(device) else torch.cuda.device(device)


def device_of(arguments: Iterable[object]) -> torch.device | None:
    """Return the device of the first tensor among a kernel's arguments.

    Args:
        arguments: Kernel arguments; tuples and tensor descriptors are searched too.

    Returns:
        The device, or None without a tensor.
    """
    for argument in arguments:
        found = None
        if isinstance(argument, Tensor):
            found = argument.device
        elif isinstance(argument, tuple):
            found = device_of(argument)
        elif isinstance(base := getattr(argument, "base", None), Tensor):
            found = base.device
        if found is not None:
            return found
    return None
