"""Recorded kernel launches of one kind of call, with relocatable addresses.

Each address is stored relative to the memory that contains it. A :class:`Recording` holds no tensors. A :class:`Record`
binds a recording to one layer: the addresses of its weights are filled in once, those of a call's tensors at each
start.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
class Span:
    """Address range of the memory of one owner.

    Attributes:
        owner: Owner of the memory.
        start: First address.
        end: Address after the last byte.
    """

    owner: Owner
    start: int
    end: int

    @staticmethod
    def of(owner: Owner, tensor: Tensor) -> Span:
        """Return the address range of a tensor.

        Args:
            owner: Owner of the memory.
            tensor: The tensor.

        Returns:
            The range from the tensor's first to its last element.
        """
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            return Span(owner, start, start + tensor.nbytes)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(owner, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


class WeightMemory:
    """Memory blocks that contain a layer's weights, and the layout of the weights in them.

    Each block is listed once. ``layout`` is equal for layers whose tensors are stored alike. Everything is valid only
    while the ``places`` of the weights are unmoved.

    Args:
        weights: The weights of the layer.
    """

    def __init__(self, weights: Lasting) -> None:
        #: number of each memory block by address
        numbers: dict[int, int] = {}
        self.spans: list[Span] = []
        self._tensors: list[Tensor] = []
        self.places = TensorPlaces(tensor for _, tensor in weights.tensors())
        layout: list[Any] = [weights.device]
        for name, tensor in weights.tensors():
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in numbers:
                numbers[start] = len(numbers)
                self.spans.append(Span(("weights", numbers[start]), start, start + storage.nbytes()))
                self._tensors.append(tensor)
            layout += (name, tensor.dtype, tensor.shape, tensor.stride(), numbers[start], tensor.storage_offset())
        self.layout = (*layout, *(span.start % ALIGNMENT for span in self.spans))

    def starts(self) -> dict[Owner, int]:
        """Return the address of each memory block."""
        return {span.owner: span.start for span in self.spans}

    def tensor_at(self, number: int, offset: int, dtype: torch.dtype) -> Tensor:
        """Return one element of a memory block as a tensor.

        Args:
            number: Number of the memory block.
            offset: Offset in bytes.
            dtype: Dtype of the element.

        Returns:
            Tensor [1], a view of the block.

        Raises:
            NotReplayable: If the offset is not a multiple of the element size.
        """
        return _element(self._tensors[number], offset, dtype)


def _element(within: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """Return one element of the storage of ``within``, at a byte offset from its start."""
    place, beyond = divmod(offset, dtype.itemsize)
    if beyond:
        raise NotReplayable(f"a descriptor at byte offset {offset}, not a multiple of its element size")
    return torch.empty(0, dtype=dtype, device=within.device).set_(within.untyped_storage(), place, (1,), (1,))


@dataclass(frozen=True)
class _Place:
    """An address, as an offset within the memory of its owner."""

    owner: Owner
    offset: int


@dataclass(frozen=True)
class _Described:
    """A TMA descriptor without its base tensor, which starts at ``place``."""

    descriptor: Any
    place: _Place
    dtype: torch.dtype


class Recording:
    """The launches of one kind of call.

    Args:
        launched: Launches that a call made.
        spans: Memory that their addresses may point to.
        scratch: Bytes of workspace in use.

    Raises:
        NotReplayable: If a launch was not compiled, or an address cannot be assigned to one owner.
    """

    def __init__(self, launched: Sequence[Launch], spans: Sequence[Span], *, scratch: int) -> None:
        self.scratch = scratch
        self.scratch_alignment = next((span.start for span in spans if span.owner == SCRATCH), 0) % ALIGNMENT
        #: whether a TMA descriptor contains the address of the workspace
        self.describes_scratch = False
        self._spans = spans
        self.launches = [self._prepared(one) for one in launched]
        self._spans = ()

    def _prepared(self, one: Launch) -> tuple[Any, ...]:
        compiled = one.compiled
        if not (hasattr(compiled, "run") and hasattr(compiled, "function") and hasattr(compiled, "packed_metadata")):
            raise NotReplayable(f"{one.name} was not compiled")  # run by Triton's interpreter
        grid = (*one.grid, 1, 1)[:3]
        arguments = [self._placed(value) for value in one.arguments.values()]
        return compiled.run, grid, compiled.function, compiled.packed_metadata, arguments

    def _placed(self, value: Any) -> Any:
        """Replace tensors in ``value`` by places."""
        if value is None or isinstance(value, int | float | str):
            return value
        if isinstance(value, Tensor):
            return self._place(value) if value.numel() else value.data_ptr()
        if isinstance(value, tuple):
            return tuple(self._placed(item) for item in value)
        base = getattr(value, "base", None)
        if not isinstance(base, Tensor):
            return value
        place = self._place(base)
        if place.owner == SCRATCH:
            self.describes_scratch = True
        elif isinstance(place.owner, int):
            raise NotReplayable("a descriptor of one of the call's tensors")
        descriptor = copy.copy(value)
        descriptor.base = None
        return _Described(descriptor, place, base.dtype)

    def _place(self, tensor: Tensor) -> _Place:
        inner = Span.of(SCRATCH, tensor)
        around = [span for span in self._spans if span.start <= inner.start and inner.end <= span.end]
        if len({span.owner for span in around}) != 1:
            raise NotReplayable(f"memory of {len(around)} owners")
        return _Place(around[0].owner, inner.start - around[0].start)


class Record:
    """A recording bound to one layer.

    Args:
        recording: The launches.
        memory: Memory of the layer's weights.
        scratch: The workspace as it is now, or None.

    Raises:
        NotReplayable: If a descriptor cannot be rebuilt.
    """

    def __init__(self, recording: Recording, memory: WeightMemory, scratch: Tensor | None) -> None:
        self.recording = recording
        #: address of the workspace if a TMA descriptor contains it
        self.fixed_scratch = scratch.data_ptr() if scratch is not None and recording.describes_scratch else None
        #: number of earlier bindings to other workspaces
        self.bindings = 0
        self._memory, self._starts, self._scratch = memory, memory.starts(), scratch
        #: addresses to fill in: (list, index in it, owner of the memory, offset in bytes)
        self._addresses: list[tuple[list[Any], int, Owner, int]] = []
        #: tuples that contain addresses: (list, index in it, items of the tuple); inner tuples first
        self._tuples: list[tuple[list[Any], int, list[Any]]] = []
        self._launches = [(*head, self._filled(arguments)[0]) for *head, arguments in recording.launches]
        del self._memory, self._starts, self._scratch
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

    def _filled(self, placed: Sequence[Any]) -> tuple[list[Any], bool]:
        """Fill in the persistent addresses, and note the places of the others.

        Also returns whether other addresses remain.
        """
        arguments, changes = list(placed), False
        for index, value in enumerate(placed):
            if isinstance(value, _Place):
                start = self._starts.get(value.owner)
                if start is not None:
                    arguments[index] = start + value.offset
                else:
                    self._addresses.append((arguments, index, value.owner, value.offset))
                    changes = True
            elif isinstance(value, tuple):
                items, inner = self._filled(value)
                arguments[index] = tuple(items)
                if inner:
                    self._tuples.append((arguments, index, items))
                    changes = True
            elif isinstance(value, _Described):
                arguments[index] = self._described(value)
        return arguments, changes

    def _described(self, value: _Described) -> Any:
        owner, offset = value.place.owner, value.place.offset
        descriptor = copy.copy(value.descriptor)
        if isinstance(owner, tuple):
            descriptor.base = self._memory.tensor_at(owner[1], offset, value.dtype)
        elif self._scratch is not None:
            # engines pass a slice of a larger buffer, which may start at any offset; its elements are bytes
            descriptor.base = _element(self._scratch, int(self._scratch.storage_offset()) + offset, value.dtype)
        return descriptor
