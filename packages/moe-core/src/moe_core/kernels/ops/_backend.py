"""Choose the implementation of an op: the Triton kernel or the PyTorch reference."""

from __future__ import annotations

import os

from torch import Tensor

from moe_core.errors import ConfigError, UnsupportedDeviceError
from moe_core.kernels.launch.launch import is_recording

BACKENDS = ("auto", "torch", "triton")


def interpreting() -> bool:
    """Whether Triton kernels run on the CPU in Triton's interpreter.

    This is decided when Triton is imported.
    """
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def use_triton(tensor: Tensor, backend: str, *, unsupported: str | None = None) -> bool:
    """Decide whether the Triton kernel runs on ``tensor``.

    ``auto`` takes the kernel on a GPU if it supports the request, else the PyTorch reference. ``triton`` requires the
    kernel. While launches are recorded, meta tensors count as GPU tensors. ``unsupported`` is the reason why the kernel
    does not support the request.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; known: {', '.join(BACKENDS)}")
    if backend == "torch":
        return False
    on_gpu = tensor.device.type == "cuda" or (tensor.is_meta and is_recording())
    if backend == "auto":
        return on_gpu and unsupported is None
    if unsupported is not None:
        raise ConfigError(f"not supported by the Triton kernel: {unsupported}")
    # meta tensors: the launch is only recorded
    if not on_gpu and tensor.device.type != "meta" and not interpreting():
        raise UnsupportedDeviceError(
            f"the Triton kernel needs a GPU, the tensor is on {tensor.device}; use backend='torch' or 'auto'"
        )
    return True
