"""Stack the tensors of many experts while reading them.

Concurrent requests for tensors of a layer are read in one pass over the file: w13 and w2 of an expert are adjacent
there. Fewer system calls also mean fewer waits for the GIL.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from moe_core.checkpoint.experts.layer_experts import LayerExperts
from moe_core.checkpoint.files.reading_threads import in_threads
from moe_core.checkpoint.files.staging import PIECE_BYTES, bytes_of, is_staged, places, staging
from moe_core.checkpoint.files.tensor_names import Key
from moe_core.errors import CheckpointError

#: Stored bytes of the experts read at a time on the CPU; fits the CPU cache, in which values are then checked.
GROUP_BYTES = 8 << 20
#: Stored bytes of the experts read at a time for a GPU.
GPU_GROUP_BYTES = PIECE_BYTES
#: Stored bytes of the experts arranged at a time on a GPU. Large chunks need few kernel launches, after each of which a
#: thread waits for the GIL.
ARRANGED_BYTES = 8 * GPU_GROUP_BYTES
#: Alignment in bytes of the first tensor of each kind, so that it can be viewed as any dtype.
_ALIGNED = 64

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """Request for stacked tensors ``[E, rows, ...]`` of one or several projections.

    Rows of several projections are concatenated.

    Attributes:
        projections: Projections in the order of their rows.
        suffix: Suffix of the tensors' names.
        dtype: dtype of the result; default as stored.
        arrange: Maps stored tensors of n experts ``[n, ...]`` to the result ``[n, rows, ...]``, both on the device.
        check: Maps results of some experts to a bool scalar on the device, True to refuse them. All scalars are
            evaluated together, so that a GPU synchronizes once. The caller turns the resulting BadValuesError into a
            CheckpointError with the tensor's name.
    """

    projections: Sequence[str]
    suffix: str
    dtype: torch.dtype | None = None
    arrange: Callable[[Tensor], Tensor] | None = None
    check: Callable[[Tensor], Tensor] | None = None


Query = Generator[ExpertStack, Tensor, T]
"""Generator that requests stacks one after another (``tensor = yield ExpertStack(...)``) and returns a result."""


class BadValuesError(CheckpointError):
    """Error for tensors whose values a check refused.

    Attributes:
        tensor: Name of the first refused tensor.
        count: Number of refused tensors.
        expert: Global id of the expert of the first one.
        projection: Projection of the first one.
        stack: The request whose check failed.
    """

    def __init__(self, tensor: str, count: int, total: int, *, expert: int = 0, projection: str = "") -> None:
        super().__init__(f"{tensor} holds values that are refused ({count} of {total} tensors do)")
        self.tensor = tensor
        self.count = count
        self.expert = expert
        self.projection = projection
        self.stack: ExpertStack | None = None


def load_stacked(
    layer: LayerExperts,
    projections: Sequence[str],
    suffix: str,
    *,
    experts: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    arrange: Callable[[Tensor], Tensor] | None = None,
    check: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Read one :class:`ExpertStack`.

    Several experts are read at a time, into pinned memory if ``device`` is a GPU.

    Args:
        layer: The layer's expert tensors.
        projections: Projections in the order of their rows.
        suffix: Suffix of the tensors' names.
        experts: Global ids of the experts.
        device: Where the result is allocated.
        dtype: dtype of the result; default as stored.
        arrange: Maps stored tensors of n experts ``[n, ...]`` to the result ``[n, rows, ...]``, both on the device.
        check: Maps results of some experts to a bool scalar on the device, True to refuse them.

    Returns:
        ``[len(experts), rows, ...]`` on ``device``.

    Raises:
        BadValuesError: ``check`` refused values.
        CheckpointError: ``experts`` is empty, or tensors are missing or cannot be read.
    """
    return _read(layer, [ExpertStack(projections, suffix, dtype, arrange, check)], experts, device)[0]


def load_together(
    layer: LayerExperts, queries: Sequence[Query[T]], *, experts: Sequence[int], device: torch.device | str
) -> list[T]:
    """Run several generators of stack requests and read their concurrent requests together.

    Args:
        layer: The layer's expert tensors.
        queries: Generators that request stacks. A BadValuesError is raised inside the generator that requested the
            refused stack.
        experts: Global ids of the experts.
        device: Where the stacks are allocated.

    Returns:
        The result of each generator.

    Raises:
        CheckpointError: ``experts`` is empty, or tensors are missing, invalid or refused.
    """
    results: dict[int, T] = {}
    # The call that resumes each generator; the first one passes no tensor.
    steps: dict[int, Callable[[], ExpertStack]] = {number: one.__next__ for number, one in enumerate(queries)}
    while steps:
        wanted: dict[int, ExpertStack] = {}
        for number in sorted(steps):
            try:
                wanted[number] = steps.pop(number)()
            except StopIteration as stop:
                results[number] = stop.value
        try:
            found = _read(layer, list(wanted.values()), experts, device)
        except BadValuesError as error:
            for number, stack in wanted.items():
                if stack is error.stack:
                    queries[number].throw(error)
            raise
        steps = {number: partial(queries[number].send, tensor) for number, tensor in zip(wanted, found, strict=True)}
        del found  # unused tensors are freed while the next ones are read
    return [results[number] for number in range(len(queries))]


def _read(
    layer: LayerExperts, stacks: Sequence[ExpertStack], experts: Sequence[int], device: torch.device | str
) -> list[Tensor]:
    """Read all ``stacks``, which must not share a tensor, in groups of experts."""
    if not stacks:
        return []
    if not experts:
        raise CheckpointError(f"{layer.prefix}: experts is empty, expected at least one")
    if len({(name, stack.suffix) for stack in stacks for name in stack.projections}) < sum(
        len(stack.projections) for stack in stacks
    ):
        raise ValueError("a tensor is requested twice at the same time")
    target = torch.device(device)
    on_gpu = is_staged(target)
    kept = [_PendingReads(layer, stack, len(experts), target) for stack in stacks]
    # Stacks that pass through a staging buffer.
    on_the_way = [one for one in kept if on_gpu or one.arrange is not None]
    each = sum(one.each for one in kept)
    room = (GPU_GROUP_BYTES if on_gpu else GROUP_BYTES) - _ALIGNED * sum(len(one.sizes) for one in kept)
    many = max(1, room // max(1, each))
    groups = [slice(at, min(at + many, len(experts))) for at in range(0, len(experts), many)]
    chunks = _ChunkedReads(kept, groups) if on_gpu else None

    def filled(number: int) -> list[Tensor]:
        """Read one group of experts; on the CPU, also check it while it is in the cache."""
        slots = groups[number]
        count = slots.stop - slots.start
        begins = list(itertools.accumulate((one.nbytes(count) for one in on_the_way), initial=0))
        piece = staging(begins[-1], target) if on_the_way else None
        spots = (
            {} if piece is None else {one: piece.room[begin:] for one, begin in zip(on_the_way, begins, strict=False)}
        )
        outs: dict[Key, Sequence[memoryview]] = {}
        for one in kept:
            outs |= one.places(spots[one] if one in spots else one.room[slots.start * one.each :], count)
        layer.read_all(experts[slots], outs)
        if piece is not None and chunks is not None:
            piece.copy_to(chunks.places(number), begins)
            return []
        for one, begin in zip(on_the_way, begins, strict=False):
            if piece is not None and one.arrange is not None:
                one.put(slots, piece.tensor[begin:], one.arrange)
        return [one.check(one.tensor[slots]) for one in kept if one.check is not None]

    flags: list[Tensor] = []
    with contextlib.closing(in_threads(filled, len(groups), each * len(experts))) as reading:
        for number, found in enumerate(reading):
            flags += found
            if chunks is not None:
                chunks.arrange(number)
    if on_gpu:
        flags = [one.check(one.tensor) for one in kept if one.check is not None]
    if flags and bool(torch.stack(flags).any()):
        for one in kept:
            one.refuse(experts)
    return [one.tensor for one in kept]


class _ChunkedReads:
    """GPU destinations of groups of experts.

    A destination is the result itself, or a scratch buffer from which the result is arranged.

    Many groups form a chunk, which is arranged at once with few kernel launches.
    """

    def __init__(self, kept: Sequence[_PendingReads], groups: Sequence[slice]) -> None:
        self._kept, self._groups = kept, groups
        self._lock = threading.Lock()
        arranged = [one for one in kept if one.arrange is not None]
        each = groups[0].stop * sum(one.each for one in arranged)
        #: Number of groups per chunk. One if projections differ, because each group then stores them separately.
        self._many = max(1, ARRANGED_BYTES // max(1, each)) if all(one.by_expert for one in arranged) else 1
        #: For each chunk and each of ``kept``, its buffer and the views of its groups.
        self._memory: dict[int, list[tuple[Tensor, Sequence[Tensor]]]] = {}

    def places(self, number: int) -> list[Tensor]:
        """Return the destination of the group ``number`` for each of ``kept``."""
        chunk, place = divmod(number, self._many)
        with self._lock:
            if chunk not in self._memory:
                self._memory[chunk] = [self._of(one, self._slots(chunk)) for one in self._kept]
            return [parts[place] for _, parts in self._memory[chunk]]

    def arrange(self, number: int) -> None:
        """Arrange a chunk if ``number`` is its last group; all earlier groups have been copied."""
        chunk = number // self._many
        if number + 1 < min((chunk + 1) * self._many, len(self._groups)):
            return
        with self._lock:
            memory = self._memory.pop(chunk)
        for one, (whole, _) in zip(self._kept, memory, strict=True):
            if one.arrange is not None:
                one.put(self._slots(chunk), whole, one.arrange)

    def _slots(self, chunk: int) -> slice:
        groups = self._groups[chunk * self._many : (chunk + 1) * self._many]
        return slice(groups[0].start, groups[-1].stop)

    def _of(self, one: _PendingReads, slots: slice) -> tuple[Tensor, Sequence[Tensor]]:
        if one.arrange is None:
            whole = one.flat[slots.start * one.each : slots.stop * one.each]
        else:
            nbytes = one.each * (slots.stop - slots.start) if one.by_expert else one.nbytes(slots.stop - slots.start)
            whole = torch.empty(nbytes, dtype=torch.uint8, device=one.device)
        if self._many == 1:
            return whole, (whole,)
        groups = [at for at in self._groups if slots.start < at.stop <= slots.stop]
        return whole, torch.split(whole, [one.each * (at.stop - at.start) for at in groups])


class _PendingReads:
    """State of a stack that is being read.

    Attributes:
        sizes: Stored size in bytes of each of one expert's tensors.
        each: Sum of ``sizes``.
        by_expert: Whether the tensors of one expert are adjacent in the staging buffer.
        tensor: The result, once its shape is known.
        flat: Bytes of the result, if nothing is arranged.
        room: Writable buffer of the result, if nothing is arranged and the result is on the CPU.
    """

    tensor: Tensor
    flat: Tensor
    room: memoryview

    def __init__(self, layer: LayerExperts, stack: ExpertStack, count: int, device: torch.device) -> None:
        self._layer, self._stack, self._count, self.device = layer, stack, count, device
        self._lock = threading.Lock()
        self._stored = [_dtype(layer, projection, stack.suffix) for projection in stack.projections]
        self._shapes = [layer.shape(projection, stack.suffix) for projection in stack.projections]
        self.sizes = [
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(self._shapes, self._stored, strict=True)
        ]
        self.each = sum(self.sizes)
        self.check = stack.check
        self.arrange = stack.arrange
        if self.arrange is None and {*self._stored} != {stack.dtype or self._stored[0]}:
            self.arrange = _as_stored
        # If all tensors of an expert have one shape and dtype, they are adjacent and arranged as one tensor.
        alike = len({*zip(self._shapes, self._stored, strict=True)}) == 1
        self.by_expert = alike or self.arrange is None
        self._starts: list[int] = []
        if self.arrange is None:
            self._allocate(self._shapes, self._stored[0])
            self.flat = self.tensor.view(-1).view(torch.uint8)
            if device.type == "cpu":
                self.room = bytes_of(self.tensor)

    def nbytes(self, count: int) -> int:
        """Return the staging size of ``count`` experts in bytes."""
        return self._begins(count)[-1]

    def _begins(self, count: int) -> list[int]:
        """Return the offset of each projection's first tensor, and the end."""
        if self.by_expert:
            return [*itertools.accumulate(self.sizes[:-1], initial=0), _aligned(count * self.each)]
        return [*itertools.accumulate((_aligned(count * size) for size in self.sizes), initial=0)]

    def places(self, room: memoryview, count: int) -> dict[Key, Sequence[memoryview]]:
        """Return the buffers for the tensors of ``count`` experts in ``room``."""
        steps = [self.each] * len(self.sizes) if self.by_expert else self.sizes
        spots = zip(self._stack.projections, self._begins(count), steps, self.sizes, strict=False)
        return {(name, self._stack.suffix): places(room, begin, step, size, count) for name, begin, step, size in spots}

    def put(self, slots: slice, here: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        """Arrange the stored tensors in ``here``, laid out as in :meth:`places`, into the result."""
        count = slots.stop - slots.start
        try:
            if self.by_expert:
                stored = here[: count * self.each].view(self._stored[0])
                part = arrange(stored.view(count * len(self.sizes), *self._shapes[0]))
                self._allocate([tuple(part.shape[1:])] * len(self.sizes), self._stack.dtype or part.dtype)
                _copy_bytes(self.tensor[slots].view(part.shape), part)
                return
            parts = [
                arrange(here[begin : begin + size * count].view(dtype).view(count, *shape))
                for begin, size, shape, dtype in zip(
                    self._begins(count), self.sizes, self._shapes, self._stored, strict=False
                )
            ]
        except BadValuesError as error:
            error.stack = self._stack
            raise
        self._allocate([tuple(part.shape[1:]) for part in parts], self._stack.dtype or parts[0].dtype)
        for part, begin, end in zip(parts, self._starts, self._starts[1:], strict=False):
            _copy_bytes(self.tensor[slots, begin:end], part)

    def _allocate(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """Allocate the result on the first call; ``shapes`` has one entry per projection."""
        with self._lock:
            if self._starts:
                return
            starts = list(itertools.accumulate((shape[0] for shape in shapes), initial=0))
            shape = (self._count, starts[-1], *shapes[0][1:])
            self.tensor = torch.empty(shape, dtype=dtype, device=self.device)
            self._starts = starts

    def refuse(self, experts: Sequence[int]) -> None:
        """Raise BadValuesError for values that the check refuses."""
        if self.check is None:
            return
        layer, stack = self._layer, self._stack
        every = [(slot, number) for slot in range(len(experts)) for number in range(len(stack.projections))]
        refused = [
            (slot, number)
            for slot, number in every
            if bool(self.check(self.tensor[slot : slot + 1, self._starts[number] : self._starts[number + 1]]))
        ]
        if not refused:
            return
        expert, projection = experts[refused[0][0]], stack.projections[refused[0][1]]
        name = layer.name(expert, projection, stack.suffix) + (f"[{expert}]" if layer.stacked_names else "")
        error = BadValuesError(name, len(refused), len(every), expert=expert, projection=projection)
        error.stack = stack
        raise error


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _copy_bytes(to: Tensor, source: Tensor) -> None:
    """Copy a tensor, as uint8 if both dtypes are the same one-byte type.

    torch copies strided rows in dtypes that it computes with.
    """
    if to.dtype == source.dtype and to.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _as_stored(stored: Tensor) -> Tensor:
    return stored


def _dtype(layer: LayerExperts, projection: str, suffix: str) -> torch.dtype:
    dtype = layer.dtype(projection, suffix)
    if dtype is None:
        name, kind = layer.name(0, projection, suffix), layer.stored_dtype(projection, suffix)
        raise CheckpointError(f"{name} has the type {kind}, which torch does not support")
    return dtype
