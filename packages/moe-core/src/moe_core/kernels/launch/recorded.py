"""The kernel launches of one kind of call, with every address by whose memory it lies in.

A :class:`Recording` holds no tensor.  A :class:`Record` is a recording for one layer: the addresses of its weights are
filled in, those of a call's tensors are put in whenever the launches are started.
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

#: kernels are compiled for addresses that are multiples of so many bytes, or for any
ALIGNMENT = 16

#: what an address may belong to: the scratch memory, a tensor of the call (its number), memory of the weights
SCRATCH = "workspace"
Owner = int | str | tuple[str, int]


class Lasting(Protocol):
    """Tensors whose memory stays: the weights of a layer, say."""

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...


class NotReplayable(Exception):  # noqa: N818 - an answer, no error
    """A launch depends on something that the record cannot follow."""


@dataclass(frozen=True)
class Span:
    """Bytes from ``start`` to ``end`` of the memory that ``owner`` names."""

    owner: Owner
    start: int
    end: int

    @staticmethod
    def of(owner: Owner, tensor: Tensor) -> Span:
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            return Span(owner, start, start + tensor.nbytes)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(owner, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


class WeightMemory:
    """The pieces of memory that a layer's weights are stored in, each once, and the layout of the weights in them.

    ``layout`` is equal for two layers whose tensors are stored alike.  All of it is valid only while the ``places`` of
    the weights are unmoved.
    """

    def __init__(self, weights: Lasting) -> None:
        #: by the address of a piece: its number
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
        """The address of each piece."""
        return {span.owner: span.start for span in self.spans}

    def tensor_at(self, number: int, offset: int, dtype: torch.dtype) -> Tensor:
        """One element, ``offset`` bytes from the start of a piece."""
        return _element(self._tensors[number], offset, dtype)


def _element(within: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """One element of the storage of ``within``, ``offset`` bytes from the storage's start."""
    place, beyond = divmod(offset, dtype.itemsize)
    if beyond:
        raise NotReplayable(f"a descriptor {offset} bytes from the start of its memory")
    return torch.empty(0, dtype=dtype, device=within.device).set_(within.untyped_storage(), place, (1,), (1,))


@dataclass(frozen=True)
class _Place:
    """An address: whose memory it is in, how far from its start."""

    owner: Owner
    offset: int


@dataclass(frozen=True)
class _Described:
    """A descriptor for the tensor memory accelerator, without its tensor, which begins at ``place``."""

    descriptor: Any
    place: _Place
    dtype: torch.dtype


class Recording:
    """The launches of one kind of call.

    ``launched``: what a call started; ``spans``: the memory that its addresses may lie in; ``scratch``: bytes of
    scratch memory.  Raises NotReplayable.
    """

    def __init__(self, launched: Sequence[Launch], spans: Sequence[Span], *, scratch: int) -> None:
        self.scratch = scratch
        self.scratch_alignment = next((span.start for span in spans if span.owner == SCRATCH), 0) % ALIGNMENT
        #: whether a descriptor holds the scratch memory's address
        self.describes_scratch = False
        self._spans = spans
        self.launches = [self._prepared(one) for one in launched]
        self._spans = ()

    def _prepared(self, one: Launch) -> tuple[Any, ...]:
        compiled = one.compiled
        if not (hasattr(compiled, "run") and hasattr(compiled, "function") and hasattr(compiled, "packed_metadata")):
            raise NotReplayable(f"{one.name} was not compiled")  # Triton's interpreter
        grid = (*one.grid, 1, 1)[:3]
        arguments = [self._placed(value) for value in one.arguments.values()]
        return compiled.run, grid, compiled.function, compiled.packed_metadata, arguments

    def _placed(self, value: Any) -> Any:
        """``value`` with places where there were tensors."""
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
    """A recording for the layer whose weights lie in ``memory``, and its ``scratch`` memory as it is now (None: none).

    Raises NotReplayable.
    """

    def __init__(self, recording: Recording, memory: WeightMemory, scratch: Tensor | None) -> None:
        self.recording = recording
        #: the scratch memory's address, where a descriptor holds it
        self.fixed_scratch = scratch.data_ptr() if scratch is not None and recording.describes_scratch else None
        #: how often it was made for other scratch memory before
        self.bindings = 0
        self._memory, self._starts, self._scratch = memory, memory.starts(), scratch
        #: (where an address stands: a list and a place in it; whose memory it is in, how far from its start)
        self._addresses: list[tuple[list[Any], int, Owner, int]] = []
        #: tuples that hold addresses: where one stands, and its items; inner ones first
        self._tuples: list[tuple[list[Any], int, list[Any]]] = []
        self._launches = [(*head, self._filled(arguments)[0]) for *head, arguments in recording.launches]
        del self._memory, self._starts, self._scratch
        self._lock = threading.Lock()

    def start(self, addresses: Mapping[Owner, int], stream: int) -> bool:
        """Start the launches with the call's ``addresses``; False where another thread is just doing so."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # no Python function is called for an address: there are dozens
            for arguments, place, owner, offset in self._addresses:
                arguments[place] = addresses[owner] + offset
            for arguments, place, items in self._tuples:
                arguments[place] = tuple(items)
            for run, grid, function, metadata, arguments in self._launches:
                # as Triton's own dispatch ends; None: what hooks around the launch would get, and the hooks
                run(*grid, stream, function, metadata, None, None, None, *arguments)
        finally:
            self._lock.release()
        return True

    def _filled(self, placed: Sequence[Any]) -> tuple[list[Any], bool]:
        """``placed`` with the addresses that stay, and whether there are others, whose places are noted."""
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
            # engines give a part of a buffer of theirs, which need not be the first one; its elements are bytes
            descriptor.base = _element(self._scratch, int(self._scratch.storage_offset()) + offset, value.dtype)
        return descriptor
