"""The current GPU is that of the tensors: Triton, and what compiles kernels as it runs, launch on the current one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()


def is_elsewhere(device: torch.device) -> bool:
    """Whether ``device`` is a GPU, and not the current one."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """A context in which ``device``, if it is a GPU, is the current one; costs little where it is anyway."""
    return _NOTHING if device is None or not is_elsewhere(device) else torch.cuda.device(device)


def device_of(arguments: Iterable[object]) -> torch.device | None:
    """The device of the first tensor among a kernel's arguments, in tuples and tensor descriptors too."""
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
