"""Weights that the GPU reads partly from the host's memory, by CUDA's managed memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_HOST = -1
_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
_ATTACH_GLOBAL = 1


def _call(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


class _Managed:
    """``size`` bytes of managed memory, freed with this object."""

    def __init__(self, size: int) -> None:
        self.pointer = ctypes.c_uint64()
        _call("cuMemAllocManaged", ctypes.byref(self.pointer), ctypes.c_size_t(size), _ATTACH_GLOBAL)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (self.pointer.value, False),
            "version": 3,
        }

    def advise(self, offset: int, size: int, advice: int, where: int) -> None:
        assert self.pointer.value is not None
        start = ctypes.c_uint64(self.pointer.value + offset)
        _call("cuMemAdvise", start, ctypes.c_size_t(size), advice, where)

    def __del__(self) -> None:
        torch.cuda.synchronize()
        _call("cuMemFree_v2", self.pointer)


def managed_copy(values: Tensor, on_host: Tensor) -> Tensor:
    """A copy of ``values`` for the current GPU, whose memory has those entries that ``on_host`` does not name.

    ``on_host``: bool, of the first dimensions of ``values``; an entry should be whole pages of 64 KB.
    """
    values = values.contiguous()
    size, entry = values.nbytes, values.nbytes // on_host.numel()
    memory = _Managed(size)
    device = torch.cuda.current_device()
    for i, host in enumerate(on_host.flatten().tolist()):
        memory.advise(i * entry, entry, _PREFERRED_LOCATION, _HOST if host else device)
        memory.advise(i * entry, entry, _ACCESSED_BY, device)
    copy = torch.as_tensor(memory, device="cuda")
    copy.copy_(values.flatten().view(torch.uint8))
    return copy.view(values.dtype).view(values.shape)
