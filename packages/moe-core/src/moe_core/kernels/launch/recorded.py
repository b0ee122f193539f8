"""Recorded kernel launches of one kind of call, with relocatable addresses.

Each address is stored relative to the memory that contains it. A :class:`Recording` holds no tensors. A :class:`Record`
binds a recording to one layer: the addresses of its weights are filled in once, those of a call's tensors at each
start.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import Launch
from moe_core.spec.weights import TensorPlaces

#: alignment in bytes of addresses for which Triton specializes kernels
ALIGNMENT = 16

#: owner of an address: the workspace, a tensor of the call (its index), or memory of the weights
SCRATCH = "workspace"
Owner = int | str | tuple[str, int]


class Lasting(Protocol):
    """Tensors whose memory persists between calls, such as the weights of a layer."""

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...


class NotReplayable(Exception):  # noqa: N818 - an answer, no error
    """A launch depends on something that a record cannot reproduce.

    Signals a fallback to the ordinary call, not an error.
    """


@dataclass(frozen=True)
class Pointer:
    """An address in a launch, tagged by its origin: an offset within the memory of its owner.

    Attributes:
        owner: Owner of the memory.
        offset: Offset in bytes.
        descriptor: TMA descriptor that contains the address, without its base tensor; None for a plain address.
        dtype: Dtype of the descriptor's base tensor.
    """

    owner: Owner
    offset: int
    descriptor: Any = None
    dtype: torch.dtype = torch.uint8


def range_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address range of a tensor.

    Args:
        tensor: The tensor.

    Returns:
        Address of the first byte, and of the byte after the last element.
    """
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size() if tensor.numel() else start


class WeightMemory:
    """Memory blocks that contain a layer's weights, and the layout of the weights in them.

    Each block is listed once. ``layout`` is equal for layers whose tensors are stored alike. Everything is valid only
    while the ``places`` of the weights are unmoved.

    Args:
        weights: The weights of the layer.

    Attributes:
        places: Places of the weights.
        blocks: A tensor in each block, whose address is the key.
        ranges: Owner, first address and end of each block.
        layout: Dtypes, shapes, strides and offsets of the weights, and alignments of the blocks.
    """

    def __init__(self, weights: Lasting) -> None:
        self.places = TensorPlaces(tensor for _, tensor in weights.tensors())
        self.blocks: dict[int, Tensor] = {}
        layout: list[Any] = [weights.device]
        for name, tensor in weights.tensors():
            start = tensor.untyped_storage().data_ptr()
            self.blocks.setdefault(start, tensor)
            number = list(self.blocks).index(start)
            layout += (name, tensor.dtype, tensor.shape, tensor.stride(), number, tensor.storage_offset())
        self.ranges: list[tuple[Owner, int, int]] = [
            (("weights", number), start, start + tensor.untyped_storage().nbytes())
            for number, (start, tensor) in enumerate(self.blocks.items())
        ]
        self.layout = (*layout, *(start % ALIGNMENT for start in self.blocks))


class Recording:
    """The launches of one kind of call; holds no tensors.

    Args:
        launched: Launches that a call made.
        ranges: Owner, first address and end of the memory that addresses may point to.
        scratch: Bytes of workspace in use.

    Raises:
        NotReplayable: If a launch was not compiled, or an address cannot be assigned to one owner.
    """

    def __init__(self, launched: Sequence[Launch], ranges: Sequence[tuple[Owner, int, int]], *, scratch: int) -> None:
        self.scratch = scratch
        self.scratch_alignment = next((start for owner, start, _ in ranges if owner == SCRATCH), 0) % ALIGNMENT
        #: whether a TMA descriptor contains the address of the workspace
        self.describes_scratch = False
        self.launches = [self._prepared(one, ranges) for one in launched]

    def _prepared(self, one: Launch, ranges: Sequence[tuple[Owner, int, int]]) -> tuple[Any, ...]:
        compiled = one.compiled
        if not (hasattr(compiled, "run") and hasattr(compiled, "function") and hasattr(compiled, "packed_metadata")):
            raise NotReplayable(f"{one.name} was not compiled")  # run by Triton's interpreter
        grid = (*one.grid, 1, 1)[:3]
        arguments = [self._relocatable(value, ranges) for value in one.arguments.values()]
        return compiled.run, grid, compiled.function, compiled.packed_metadata, arguments

    def _relocatable(self, value: Any, ranges: Sequence[tuple[Owner, int, int]]) -> Any:
        """Replace tensors in ``value`` by pointers."""
        if value is None or isinstance(value, int | float | str):
            return value
        if isinstance(value, Tensor):
            return _pointer(value, ranges) if value.numel() else value.data_ptr()
        if isinstance(value, tuple):
            return tuple(self._relocatable(item, ranges) for item in value)
        base = getattr(value, "base", None)
        if not isinstance(base, Tensor):
            return value
        pointer = _pointer(base, ranges)
        if isinstance(pointer.owner, int):
            raise NotReplayable("a descriptor of one of the call's tensors")
        self.describes_scratch |= pointer.owner == SCRATCH
        descriptor = copy.copy(value)
        descriptor.base = None
        return replace(pointer, descriptor=descriptor, dtype=base.dtype)


def _pointer(tensor: Tensor, ranges: Sequence[tuple[Owner, int, int]]) -> Pointer:
    first, end = range_of(tensor)
    around = {owner: start for owner, start, last in ranges if start <= first and end <= last}
    if len(around) != 1:
        raise NotReplayable(f"memory of {len(around)} owners")
    ((owner, start),) = around.items()
    return Pointer(owner, first - start)


class Record:
    """A recording bound to one layer.

    Args:
        recording: The launches.
        memory: Memory of the layer's weights.
        scratch: The workspace as it is now, or None.
        bindings: Number of earlier bindings to other workspaces.

    Raises:
        NotReplayable: If a descriptor cannot be rebuilt.
    """

    def __init__(self, recording: Recording, memory: WeightMemory, scratch: Tensor | None, bindings: int = 0) -> None:
        self.recording = recording
        #: address of the workspace if a TMA descriptor contains it
        self.fixed_scratch = scratch.data_ptr() if scratch is not None and recording.describes_scratch else None
        self.bindings = bindings
        #: addresses to fill in: (list, index in it, owner of the memory, offset in bytes)
        self._addresses: list[tuple[list[Any], int, Owner, int]] = []
        #: tuples that contain addresses: (list, index in it, items of the tuple); inner tuples first
        self._tuples: list[tuple[list[Any], int, list[Any]]] = []
        self._launches = [(*head, self._filled(arguments, memory, scratch)) for *head, arguments in recording.launches]
        self._lock = threading.Lock()

    def start(self, addresses: Mapping[Owner, int], stream: int) -> bool:
        """Start the launches with the addresses of a call.

        Args:
            addresses: Address of each owner's memory.
            stream: CUDA stream.

        Returns:
            False, without any launch, if another thread is starting the same record.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # no Python function call per address: there are dozens of addresses
            for arguments, place, owner, offset in self._addresses:
                arguments[place] = addresses[owner] + offset
            for arguments, place, items in self._tuples:
                arguments[place] = tuple(items)
            for run, grid, function, metadata, arguments in self._launches:
                # the last step of Triton's dispatch; the None values are the hooks' metadata and the two launch hooks
                run(*grid, stream, function, metadata, None, None, None, *arguments)
        finally:
            self._lock.release()
        return True

    def _filled(self, relocatable: Sequence[Any], memory: WeightMemory, scratch: Tensor | None) -> list[Any]:
        """Fill in the addresses that persist, and note the places of the others."""
        arguments = list(relocatable)
        for index, value in enumerate(relocatable):
            if isinstance(value, tuple):
                noted = len(self._addresses)
                items = self._filled(value, memory, scratch)
                arguments[index] = tuple(items)
                if len(self._addresses) > noted:
                    self._tuples.append((arguments, index, items))
            elif not isinstance(value, Pointer):
                continue
            elif value.descriptor is not None:
                arguments[index] = _descriptor(value, memory, scratch)
            elif isinstance(value.owner, tuple):
                arguments[index] = memory.ranges[value.owner[1]][1] + value.offset
            else:
                self._addresses.append((arguments, index, value.owner, value.offset))
        return arguments


def _descriptor(pointer: Pointer, memory: WeightMemory, scratch: Tensor | None) -> Any:
    """Return the TMA descriptor of a pointer to weights or to the workspace, with its base."""
    if isinstance(pointer.owner, tuple):
        within, offset = list(memory.blocks.values())[pointer.owner[1]], pointer.offset
    elif scratch is not None:
        # engines pass a slice of a larger buffer, which may start at any offset; its elements are bytes
        within, offset = scratch, int(scratch.storage_offset()) + pointer.offset
    else:
        raise NotReplayable("a descriptor of a workspace that the call does not have")
    place, beyond = divmod(offset, pointer.dtype.itemsize)
    if beyond:
        raise NotReplayable(f"a descriptor at byte offset {offset}, not a multiple of its element size")
    descriptor = copy.copy(pointer.descriptor)
    base = torch.empty(0, dtype=pointer.dtype, device=within.device)
    descriptor.base = base.set_(within.untyped_storage(), place, (1,), (1,))
    return descriptor
