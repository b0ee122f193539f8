"""Memory that tensors are read into on their way to a GPU, which copies from it by itself.

A thread has two such pieces under way: one is filled while the other is copied.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: each thread's last copy
_LAST = threading.local()


def staging(shape: Sequence[int], dtype: torch.dtype, target: torch.device) -> Tensor:
    """Empty memory on the CPU; torch keeps pinned memory, and gives none twice that is still copied from."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=target.type == "cuda")


def to_device(source: Tensor, target: torch.device) -> Tensor:
    """``source`` of :func:`staging` on ``target``; on the CPU itself."""
    if target.type != "cuda":
        return source.to(target)
    out = torch.empty(source.shape, dtype=source.dtype, device=target)
    copy_bytes(out, source)
    return out


def copy_bytes(to: Tensor, source: Tensor) -> None:
    """Copy ``source`` to where it is kept; from staging memory without waiting for it.

    By bytes where types of one byte agree: torch copies rows that lie apart in the types that it computes with.
    """
    if to.dtype == source.dtype and to.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    pinned = to.is_cuda and not source.is_cuda
    to.copy_(source, non_blocking=pinned)
    if pinned:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(to.device))
        before: torch.cuda.Event | None = getattr(_LAST, "copy", None)
        _LAST.copy = done
        if before is not None:
            before.synchronize()
