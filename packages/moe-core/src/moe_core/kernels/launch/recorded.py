"""Recorded kernel launches of one kind of call, with relocatable addresses.

Each address is stored relative to the memory that contains it. A :class:`Recording` holds no tensors. A :class:`Record`
binds a recording to one layer: the addresses of its weights are filled in once, those of a call's tensors at each
start.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from moe_core.kernels.launch.launch import HOST_STEP, Launch
from moe_core.spec.weights import TensorPlaces

#: alignment in bytes of addresses for which Triton specializes kernels
ALIGNMENT = 16

#: owner of an address: the workspace, a tensor of the call (its index), or memory of the weights
SCRATCH = "workspace"
Owner = int | str | tuple[str, int]
#: stands for the stream of a start
_STREAM: Final = object()


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
        #: None: a step of the host
        self.launches = [None if one is HOST_STEP else self._prepared(one, ranges) for one in launched]

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
        #: places of the stream: (list, index in it)
        self._streams: list[tuple[list[Any], int]] = []
        #: tuples that contain addresses: (list, index in it, items of the tuple); inner tuples first
        self._tuples: list[tuple[list[Any], int, list[Any]]] = []
        self._launches: list[tuple[Callable[..., None], list[Any]]] = []
        for prepared in recording.launches:
            if prepared is None:
                self._launches.append((self._run_step, []))
                continue
            run, grid, function, metadata, relocatable = prepared
            arguments = _resolved(relocatable, memory, scratch)
            # The last step of Triton's dispatch. The None values are the hooks' metadata and the two launch hooks.
            launch, given = _expanded(run, [*grid, _STREAM, function, metadata, None, None, None, *arguments])
            self._note(given)
            self._launches.append((launch, given))
        self._step: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def start(self, addresses: Mapping[Owner, int], stream: int, step: Callable[[], None] | None = None) -> bool:
        """Start the launches with the addresses of a call.

        Args:
            addresses: Address of each owner's memory.
            stream: CUDA stream.
            step: The call's step of the host between launches, if it has one.

        Returns:
            False, without any launch, if another thread is starting the same record.
        """
        if not self._lock.acquire(blocking=False):
            return False
        self._step = step
        try:
            # no Python function call per address: there are dozens of addresses
            for arguments, place, owner, offset in self._addresses:
                arguments[place] = addresses[owner] + offset
            for arguments, place in self._streams:
                arguments[place] = stream
            for arguments, place, items in self._tuples:
                arguments[place] = tuple(items)
            for launch, arguments in self._launches:
                launch(*arguments)
        finally:
            self._step = None
            self._lock.release()
        return True

    def _run_step(self) -> None:
        if self._step is not None:
            self._step()

    def _note(self, arguments: list[Any]) -> bool:
        """Note the places of the addresses and of the stream; return whether there are some."""
        before = len(self._addresses) + len(self._streams)
        for index, value in enumerate(arguments):
            if value is _STREAM:
                self._streams.append((arguments, index))
            elif isinstance(value, Pointer):
                self._addresses.append((arguments, index, value.owner, value.offset))
            elif isinstance(value, list):
                self._note(value)
            elif isinstance(value, tuple):
                items = list(value)
                if self._note(items):
                    self._tuples.append((arguments, index, items))
        return len(self._addresses) + len(self._streams) > before


def _resolved(relocatable: Sequence[Any], memory: WeightMemory, scratch: Tensor | None) -> list[Any]:
    """Replace the pointers whose addresses persist: those to weights, and those in descriptors."""
    found: list[Any] = []
    for value in relocatable:
        if isinstance(value, tuple):
            found.append(tuple(_resolved(value, memory, scratch)))
        elif isinstance(value, Pointer) and value.descriptor is not None:
            found.append(_descriptor(value, memory, scratch))
        elif isinstance(value, Pointer) and isinstance(value.owner, tuple):
            found.append(memory.ranges[value.owner[1]][1] + value.offset)
        else:
            found.append(value)
    return found


def _expanded(run: Any, given: list[Any]) -> tuple[Callable[..., None], list[Any]]:
    """Return the C function by which Triton starts a kernel, and the arguments that it gets for ``given``.

    At every start Triton's launcher looks for scratch memory and encodes the TMA descriptors, in Python. This takes
    longer than the C function, and gives the same results for the same addresses. So one start with markers in place of
    what changes is intercepted.

    Args:
        run: Triton's launcher.
        given: Its arguments.

    Returns:
        Function and arguments; ``run`` and ``given`` if the launcher is of an unknown kind, or needs scratch memory.
    """
    launch = getattr(run, "launch", None)
    if launch is None or any(getattr(run, name, None) != 0 for name in ("global_scratch_size", "profile_scratch_size")):
        return run, given
    if getattr(run, "gsan_enabled", False):
        return run, given
    found: list[list[Any]] = []

    def note(*arguments: Any) -> None:
        found.append([*arguments])

    intercepted = note
    names = getattr(getattr(launch, "__code__", None), "co_freevars", ())
    if "launcher" in names:  # a Python function that encodes descriptors for the C function
        cells, place = list(launch.__closure__), names.index("launcher")
        launch, cells[place] = cells[place].cell_contents, CellType(note)
        intercepted = FunctionType(run.launch.__code__, run.launch.__globals__, closure=tuple(cells))
    probe = copy.copy(run)
    probe.launch = intercepted
    probe(*given)
    return launch, found[0]


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
