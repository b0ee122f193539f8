"""Tensors of many experts, stacked while they are read.

What several parts of a layer ask for at the same time is read in one pass over the file: w13 and w2 of an expert lie
side by side there, and after each call of the system a thread waits for Python's lock.
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

#: of experts that are read at a time, as stored: small enough for a processor's cache, where values are looked at
GROUP_BYTES = 8 << 20
#: the same on the way to a GPU
GPU_GROUP_BYTES = PIECE_BYTES
#: of experts that are arranged at a time on a GPU, as stored: it is told so in few calls, after each of which a thread
#: waits for Python's lock
ARRANGED_BYTES = 8 * GPU_GROUP_BYTES
#: bytes at whose multiples tensors of one kind begin, so that they can be taken for any type
_ALIGNED = 64

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Stack:
    """What is asked for: tensors of ``projections``, one below the other, for each expert, ``[E, rows, ...]``.

    - ``dtype``: converted to it; default: as stored
    - ``arrange``: stored tensors of some experts, ``[n, ...]``, on the device -> what is kept, ``[n, rows, ...]``
    - ``check``: what is kept of some experts, on the device -> bool scalar there, True if it must be refused; all are
      looked at once, so a GPU is waited for once.  The error of a refused one is the caller's: CheckpointError with its
      name.
    """

    projections: Sequence[str]
    suffix: str
    dtype: torch.dtype | None = None
    arrange: Callable[[Tensor], Tensor] | None = None
    check: Callable[[Tensor], Tensor] | None = None


Asking = Generator[Stack, Tensor, T]
"""What asks for one stack after the other (``tensor = yield Stack(...)``) and returns what it made of them."""


class BadValuesError(CheckpointError):
    """Values that a check refused; ``tensor``, ``expert`` and ``projection``: the first one's name and whose it is."""

    def __init__(self, tensor: str, count: int, total: int, *, expert: int = 0, projection: str = "") -> None:
        super().__init__(f"{tensor} holds values that are refused ({count} of {total} tensors do)")
        self.tensor = tensor
        self.count = count
        self.expert = expert
        self.projection = projection
        self.stack: Stack | None = None


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
    """One :class:`Stack` of ``experts`` on ``device``: ``[len(experts), rows, ...]``.

    Several experts are read at a time, into memory from which a GPU copies by itself.
    Raises BadValuesError for what ``check`` refuses.
    """
    return _read(layer, [Stack(projections, suffix, dtype, arrange, check)], experts, device)[0]


def load_together(
    layer: LayerExperts, asking: Sequence[Asking[T]], *, experts: Sequence[int], device: torch.device | str
) -> list[T]:
    """What each of ``asking`` returns; what they ask for at the same time is read together.

    A BadValuesError is raised where the stack was asked for.
    """
    results: dict[int, T] = {}
    # what each goes on with; the first stack is asked for without an answer
    steps: dict[int, Callable[[], Stack]] = {number: one.__next__ for number, one in enumerate(asking)}
    while steps:
        wanted: dict[int, Stack] = {}
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
                    asking[number].throw(error)
            raise
        steps = {number: partial(asking[number].send, tensor) for number, tensor in zip(wanted, found, strict=True)}
        del found  # what is no longer used goes while the next are read
    return [results[number] for number in range(len(asking))]


def _read(
    layer: LayerExperts, stacks: Sequence[Stack], experts: Sequence[int], device: torch.device | str
) -> list[Tensor]:
    """All of ``stacks``, which have no tensor in common, some experts at a time."""
    if not stacks:
        return []
    if not experts:
        raise CheckpointError(f"{layer.prefix}: no expert was asked for")
    if len({(name, stack.suffix) for stack in stacks for name in stack.projections}) < sum(
        len(stack.projections) for stack in stacks
    ):
        raise ValueError("a tensor is asked for twice at the same time")
    target = torch.device(device)
    on_gpu = is_staged(target)
    kept = [_Kept(layer, stack, len(experts), target) for stack in stacks]
    # in memory on the way
    on_the_way = [one for one in kept if on_gpu or one.arrange is not None]
    each = sum(one.each for one in kept)
    room = (GPU_GROUP_BYTES if on_gpu else GROUP_BYTES) - _ALIGNED * sum(len(one.sizes) for one in kept)
    many = max(1, room // max(1, each))
    groups = [slice(at, min(at + many, len(experts))) for at in range(0, len(experts), many)]
    chunks = _Chunks(kept, groups) if on_gpu else None

    def filled(number: int) -> list[Tensor]:
        """Puts some experts into their places; what is said of them, while a CPU has them at hand."""
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


class _Chunks:
    """Where ``groups`` of experts are copied to on a GPU: the result, or memory from which it is arranged.

    That is done for many groups at once, a chunk: a GPU is told in few calls what to do.
    """

    def __init__(self, kept: Sequence[_Kept], groups: Sequence[slice]) -> None:
        self._kept, self._groups = kept, groups
        self._lock = threading.Lock()
        arranged = [one for one in kept if one.arrange is not None]
        each = groups[0].stop * sum(one.each for one in arranged)
        #: groups of a chunk; projections that are not alike lie apart in each group
        self._many = max(1, ARRANGED_BYTES // max(1, each)) if all(one.by_expert for one in arranged) else 1
        #: by chunk, for each of ``kept``: its memory, and where in it groups begin
        self._memory: dict[int, list[tuple[Tensor, Sequence[Tensor]]]] = {}

    def places(self, number: int) -> list[Tensor]:
        """Where each of ``kept`` has its bytes of the group ``number``."""
        chunk, place = divmod(number, self._many)
        with self._lock:
            if chunk not in self._memory:
                self._memory[chunk] = [self._of(one, self._slots(chunk)) for one in self._kept]
            return [parts[place] for _, parts in self._memory[chunk]]

    def arrange(self, number: int) -> None:
        """Arranges a chunk where ``number`` was its last group; groups are copied in order, and all by this time."""
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

    def _of(self, one: _Kept, slots: slice) -> tuple[Tensor, Sequence[Tensor]]:
        if one.arrange is None:
            whole = one.flat[slots.start * one.each : slots.stop * one.each]
        else:
            nbytes = one.each * (slots.stop - slots.start) if one.by_expert else one.nbytes(slots.stop - slots.start)
            whole = torch.empty(nbytes, dtype=torch.uint8, device=one.device)
        if self._many == 1:
            return whole, (whole,)
        groups = [at for at in self._groups if slots.start < at.stop <= slots.stop]
        return whole, torch.split(whole, [one.each * (at.stop - at.start) for at in groups])


class _Kept:
    """A stack while it is read.

    - ``sizes``: bytes of one expert's tensors, as stored, ``each``: of all of them; ``by_expert``: an expert's lie side
      by side
    - ``tensor``: the result, once its shape is known
    - where nothing is arranged, ``flat``: the result's bytes, ``room``: the same of one on the CPU, to be written
    """

    tensor: Tensor
    flat: Tensor
    room: memoryview

    def __init__(self, layer: LayerExperts, stack: Stack, count: int, device: torch.device) -> None:
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
        # an expert's lie side by side where all are of one shape and type: one tensor, with which less is to be done
        alike = len({*zip(self._shapes, self._stored, strict=True)}) == 1
        self.by_expert = alike or self.arrange is None
        self._starts: list[int] = []
        if self.arrange is None:
            self._allocate(self._shapes, self._stored[0])
            self.flat = self.tensor.view(-1).view(torch.uint8)
            if device.type == "cpu":
                self.room = bytes_of(self.tensor)

    def nbytes(self, count: int) -> int:
        """Bytes that ``count`` experts take on the way."""
        return self._begins(count)[-1]

    def _begins(self, count: int) -> list[int]:
        """Where each projection's first tensor begins, and their end."""
        if self.by_expert:
            return [*itertools.accumulate(self.sizes[:-1], initial=0), _aligned(count * self.each)]
        return [*itertools.accumulate((_aligned(count * size) for size in self.sizes), initial=0)]

    def places(self, room: memoryview, count: int) -> dict[Key, Sequence[memoryview]]:
        """Where ``count`` experts' tensors are read to."""
        steps = [self.each] * len(self.sizes) if self.by_expert else self.sizes
        spots = zip(self._stack.projections, self._begins(count), steps, self.sizes, strict=False)
        return {(name, self._stack.suffix): places(room, begin, step, size, count) for name, begin, step, size in spots}

    def put(self, slots: slice, here: Tensor, arrange: Callable[[Tensor], Tensor]) -> None:
        """Arranges what lies ``here``, as :meth:`places` says, and keeps it."""
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
        """Memory for each projection's ``shapes``, by the first who knows them."""
        with self._lock:
            if self._starts:
                return
            starts = list(itertools.accumulate((shape[0] for shape in shapes), initial=0))
            shape = (self._count, starts[-1], *shapes[0][1:])
            self.tensor = torch.empty(shape, dtype=dtype, device=self.device)
            self._starts = starts

    def refuse(self, experts: Sequence[int]) -> None:
        """BadValuesError for what the check refuses."""
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
    """By bytes where types of one byte agree: torch copies rows that lie apart in the types that it computes with."""
    if to.dtype == source.dtype and to.dtype.itemsize == 1:
        to, source = to.view(torch.uint8), source.view(torch.uint8)
    to.copy_(source)


def _as_stored(stored: Tensor) -> Tensor:
    return stored


def _dtype(layer: LayerExperts, projection: str, suffix: str) -> torch.dtype:
    dtype = layer.dtype(projection, suffix)
    if dtype is None:
        name, kind = layer.name(0, projection, suffix), layer.stored_dtype(projection, suffix)
        raise CheckpointError(f"{name} has the type {kind}, which torch has not")
    return dtype
