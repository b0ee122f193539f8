"""Peak memory of a model."""

from __future__ import annotations

import sys

import torch
from torch import nn


def reset_peak_memory() -> None:
    """Reset the peak memory statistics of all GPUs."""
    if torch.accelerator.is_available():
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.reset_peak_memory_stats(index)


def peak_memory(model: nn.Module) -> int | None:
    """Return the peak memory of a model in bytes.

    Args:
        model: model that ran.

    Returns:
        What torch allocated on the model's GPUs, or the process's peak host memory; None if unknown.
    """
    devices = {tensor.device for tensor in model.parameters()}
    gpus = [device for device in devices if device.type != "cpu"]
    if gpus:
        return sum(torch.accelerator.max_memory_allocated(device) for device in gpus)
    try:
        import resource
    except ImportError:  # not available on this system
        return None
    # KiB, except on macOS: bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
