"""Pinned staging buffers through which tensors are copied to a GPU asynchronously.

Each thread has two buffers per GPU: one is filled while the other is copied. Buffers and their views are kept, because
each call to torch or the system releases the GIL, and getting it back takes time when other threads run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

#: Bytes read at a time for a GPU. It is large so that there are few calls between reads, each of which may wait for the
#: GIL. All buffers have this size, because torch reuses pinned memory of the same size.
PIECE_BYTES = 32 << 20
#: Buffers of the current thread, by GPU index.
_OWN = threading.local()
#: Minimum size of a buffer in bytes.
_LEAST = 1 << 20


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a writable view of the bytes of a tensor.

    Args:
        tensor: Contiguous CPU tensor.

    Returns:
        Its bytes.
    """
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data


def places_of(tensor: Tensor) -> list[memoryview]:
    """Return writable views of the bytes of each entry of a tensor's first dimension.

    Args:
        tensor: CPU tensor whose entries are contiguous; the first dimension may be strided.

    Returns:
        One view per entry; empty if the tensor has no elements.

    Raises:
        ValueError: An entry is not contiguous.
    """
    if 0 in tensor.shape:
        return []
    elements: int = 1
    for length, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1], strict=True):
        if stride != elements and length != 1:
            raise ValueError("the destination must be contiguous")
        elements *= length
    size = int(elements) * tensor.itemsize
    # Slices of one view of the storage, because creating a tensor per entry takes longer than reading a small one.
    whole = bytes_of(tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0))
    begin, step = int(tensor.storage_offset()) * tensor.itemsize, tensor.stride(0) * tensor.itemsize
    return places(whole, begin, step, size, len(tensor))


def places(room: memoryview, begin: int, step: int, size: int, count: int) -> list[memoryview]:
    """Split a buffer into slices of equal size and distance.

    Args:
        room: The buffer.
        begin: Offset of the first slice in bytes.
        step: Distance between the starts of two slices in bytes.
        size: Size of a slice in bytes.
        count: Number of slices.

    Returns:
        The slices; empty if ``size`` is 0.
    """
    return [room[at : at + size] for at in range(begin, begin + step * count, step)] if size else []


class Staging:
    """A staging buffer on the CPU.

    Attributes:
        tensor: The buffer, uint8 [n].
        room: Writable view of its bytes.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.room = bytes_of(self.tensor)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def copy_to(self, outs: Sequence[Tensor], begins: Sequence[int] = (0,)) -> None:
        """Copy bytes of the buffer to tensors; asynchronously if the buffer is pinned.

        Args:
            outs: uint8 tensors on one device.
            begins: Offset in the buffer of the bytes for each tensor.
        """
        for out, begin in zip(outs, begins, strict=False):
            out.copy_(self.tensor[begin : begin + len(out)], non_blocking=self._copied is not None)
        if self._copied is not None and outs:
            self._copied.record(torch.cuda.current_stream(outs[0].device))

    def wait(self) -> None:
        """Wait until the GPU has finished the last copy from this buffer."""
        if self._copied is not None:
            self._copied.synchronize()


def is_staged(target: torch.device) -> bool:
    """Return whether reads for a device go through pinned staging buffers.

    Args:
        target: The device.

    Returns:
        True for CUDA devices.
    """
    return target.type == "cuda"


def staging(nbytes: int, target: torch.device) -> Staging:
    """Return a staging buffer.

    Args:
        nbytes: Minimum size in bytes.
        target: The device that is copied to.

    Returns:
        A new buffer, or, for a GPU, one of this thread's two buffers. The latter is reused by the second-next call for
        that GPU.
    """
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
