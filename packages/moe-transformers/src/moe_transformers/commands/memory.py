"""The most memory that a model took."""

from __future__ import annotations

import sys

import torch
from torch import nn


def reset_peak_memory() -> None:
    """Forget what was allocated on GPUs before."""
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.reset_peak_memory_stats(index)


def peak_memory(model: nn.Module) -> int | None:
    """Bytes: what torch allocated on the GPUs of ``model``, or what the process held of the host; None: unknown."""
    devices = {tensor.device for tensor in model.parameters()}
    gpus = [device for device in devices if device.type != "cpu"]
    if gpus:
        return sum(torch.accelerator.max_memory_allocated(device) for device in gpus)
    try:
        import resource
    except ImportError:  # not on this system
        return None
    # KiB, but on macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
