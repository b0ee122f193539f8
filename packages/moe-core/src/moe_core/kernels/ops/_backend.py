"""Which implementation of an op runs: the Triton kernel or its torch twin."""

from __future__ import annotations

import os

from torch import Tensor

from moe_core.errors import ConfigError, UnsupportedDeviceError
from moe_core.kernels.launch.launch import is_recording

BACKENDS = ("auto", "torch", "triton")


def interpreting() -> bool:
    """Whether Triton kernels run on the CPU in Triton's interpreter (decided when Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def use_triton(tensor: Tensor, backend: str, *, unsupported: str | None = None) -> bool:
    """Whether the kernel runs on ``tensor``.

    ``auto`` takes the kernel on a GPU if it covers the request, else the twin; ``triton`` insists on it.  Meta tensors
    whose launches are recorded stand for those of a GPU.
    ``unsupported`` says why the kernel does not cover the request.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; known: {', '.join(BACKENDS)}")
    if backend == "torch":
        return False
    on_gpu = tensor.device.type == "cuda" or (tensor.is_meta and is_recording())
    if backend == "auto":
        return on_gpu and unsupported is None
    if unsupported is not None:
        raise ConfigError(f"the Triton kernel does not cover this: {unsupported}")
    # meta tensors: the launch is only recorded
    if not on_gpu and tensor.device.type != "meta" and not interpreting():
        raise UnsupportedDeviceError(
            f"the Triton kernel needs a GPU, the tensor is on {tensor.device}; use backend='torch' or 'auto'"
        )
    return True
