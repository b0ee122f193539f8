"""Memory that tensors are read into on their way to a GPU, which copies from it by itself.

A thread has two pieces for each GPU: one is filled while the other is copied.  They stay, with what is known of them:
each call of torch or of the system lets go of Python's lock, and a thread beside others waits to get it back.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: bytes that are read at a time on their way to a GPU: so many that the calls between reads, each of which may wait for
#: Python's lock, are few.  One size for all, since torch gives pinned memory of that size again
PIECE_BYTES = 32 << 20
#: each thread's pieces, by the GPU's number
_OWN = threading.local()
#: bytes of the smallest piece
_LEAST = 1 << 20


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous ``tensor`` on the CPU, to be written."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def places_of(tensor: Tensor) -> list[memoryview]:
    """:func:`bytes_of` of each entry of ``tensor``'s first dimension; the entries may lie apart."""
    if 0 in tensor.shape:
        return []
    elements: int = 1
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if stride != elements and length != 1:
            raise ValueError("entries that are not contiguous can't be read into")
        elements *= length
    size = int(elements) * tensor.itemsize
    # of one view of the memory: making a tensor of each entry takes longer than reading a small one
    whole = bytes_of(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0))
    begin, step = int(tensor.storage_offset()) * tensor.itemsize, tensor.stride(0) * tensor.itemsize
    return places(whole, begin, step, size, len(tensor))


def places(room: memoryview, begin: int, step: int, size: int, count: int) -> list[memoryview]:
    """``count`` pieces of ``size`` bytes, ``step`` bytes apart, the first at ``begin``."""
    return [room[at : at + size] for at in range(begin, begin + step * count, step)] if size else []


class Staging:
    """Memory on the CPU: ``tensor`` uint8 [n], and its bytes as ``room`` to be written."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.room = bytes_of(self.tensor)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def copy_to(self, outs: Sequence[Tensor], begins: Sequence[int] = (0,)) -> None:
        """Copy bytes from ``begins`` on to ``outs``, uint8 on one device; to a GPU without waiting for it."""
        for out, begin in zip(outs, begins, strict=False):
            out.copy_(self.tensor[begin : begin + len(out)], non_blocking=self._copied is not None)
        if self._copied is not None and outs:
            self._copied.record(torch.cuda.current_stream(outs[0].device))

    def wait(self) -> None:
        """Until a GPU has copied what was here."""
        if self._copied is not None:
            self._copied.synchronize()


def is_staged(target: torch.device) -> bool:
    """Whether what is read for ``target`` goes through memory of :func:`staging`: a GPU's does."""
    return target.type == "cuda"


def staging(nbytes: int, target: torch.device) -> Staging:
    """At least ``nbytes`` of memory; where it is for a GPU, this thread's until it has taken two more for that."""
    if not is_staged(target):
        return Staging(nbytes)
    pinned = target.type == "cuda"
    index: int | None = target.index
    number = torch.cuda.current_device() if pinned and index is None else index
    pieces: dict[int | None, list[Staging]] = _OWN.__dict__.setdefault("pieces", {})
    own = pieces.setdefault(number, [])
    piece = own.pop(0) if len(own) == 2 else None
    if piece is not None:
        piece.wait()
    if piece is None or len(piece.room) < nbytes:
        piece = Staging(max(nbytes, _LEAST), pinned=pinned)
    own.append(piece)
    return piece
