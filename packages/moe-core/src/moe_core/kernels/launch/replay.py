"""Eager calls that repeat: their kernel launches are recorded once and started again with new addresses.

The launches of a call follow from the layer and from the shapes, strides and alignments of the call's tensors.  Finding
them costs the host far more than starting them: it is some hundred Python calls and Triton's dispatch of every launch.
So the second call of a kind records its launches, and later ones put the addresses of their own tensors into the
record and start the compiled kernels directly.  Layers that are alike, as those of one model are, share what was
recorded: a kind counts as seen when any of them was called, and each fills in the addresses of its own weights.

A record is only used where it is certain to be what the call would have launched:

- The experts and the prepare/finalize say that they do nothing on the device but launch kernels through
  :func:`moe_core.kernels.launch.launch.launch` (``launches_only``).  Any other work that torch sees while a call is
  recorded (a copy, a fill) makes calls of that kind run as usual.
- Every address in a launch lies within a tensor of the call, the layer's weights or the scratch memory, whose places
  are known.  An address from anywhere else, or from two of them, likewise.
- The weights are stored where they were when the record was made, which every call checks before it looks for one.
  Where an engine has freed their memory and allocated other memory, all records of the layer are made anew.
- Descriptors for the tensor memory accelerator hold addresses of their own: those of weights stay, those of scratch
  memory stay as long as the caller's workspace does.

Nothing is recorded under CUDA-graph capture; a record may be used while a graph is captured.

A layer on one rank is recorded as a whole.  Where tokens cross ranks each step is recorded by itself, since ranks call
each other between them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_core.kernels.launch.launch import RECORDING, Launch, observe
from moe_core.kernels.launch.recorded import (
    ALIGNMENT,
    SCRATCH,
    Lasting,
    NotReplayable,
    Owner,
    Record,
    Recording,
    Span,
    WeightMemory,
)
from moe_core.spec.workspace import Workspace

#: kinds of calls that a layer remembers; the oldest go first
MOST_RECORDS = 128

#: kinds of calls that are remembered for layers that are alike, of all models
MOST_SHARED = 1024

#: how often a record is made anew for other scratch memory: engines may alternate between buffers
MOST_BINDINGS = 16

#: a kind of call that was not seen yet
_NEW: Any = object()
#: by what layers that are alike have in common, and the kind of call; None: seen once
_SHARED: dict[tuple[Any, ...], Recording | None] = {}
#: held while what is known changes or is gone through; looking a kind up, as every call does, needs no lock
_CHANGING = threading.Lock()


class _Watch(TorchFunctionMode):
    """Notes what torch does (the last such function) but describe tensors, view them and take memory.

    Everything that is not known to be one of these counts as work.
    """

    _METADATA = frozenset(
        {
            "__get__",
            "__len__",
            "data_ptr",
            "dim",
            "element_size",
            "get_device",
            "is_contiguous",
            "is_floating_point",
            "numel",
            "size",
            "storage_offset",
            "stride",
            "untyped_storage",
        }
    )
    _VIEWS = frozenset(
        {
            "as_strided",
            "detach",
            "expand",
            "narrow",
            "permute",
            "select",
            "squeeze",
            "t",
            "transpose",
            "unflatten",
            "unsqueeze",
            "view",
            "view_as",
        }
    )
    #: views where layout and arguments allow it, else copies
    _PERHAPS = frozenset({"__getitem__", "contiguous", "flatten", "reshape", "to"})
    _MEMORY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream"})
    _NO_WORK = _METADATA | _VIEWS | _MEMORY

    def __init__(self) -> None:
        super().__init__()
        self.work: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self._PERHAPS:
            if result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
                self.work = name
        elif name not in self._NO_WORK:
            self.work = name or str(func)
        return result


class Replay:
    """The records of one layer's calls, or of the steps of its calls.

    ``parts``: what the launches depend on beside a call's tensors, by identity (experts, weights …); ``weights``: whose
    memory stays; ``alike()``: what decides the launches beside a call's tensors and where the weights lie, equal for
    layers that share what was recorded (None: this one shares nothing); ``stream``: the current stream of the device
    with this number (None: of the current device), as Triton's launcher takes it; ``watched``: whether a profiler wants
    to see launches as Triton makes them.
    """

    def __init__(
        self,
        weights: Lasting,
        parts: tuple[object, ...] = (),
        *,
        alike: Callable[[], Hashable | None] = lambda: None,
        stream: Callable[[int | None], int] | None = None,
        watched: Callable[[], bool] | None = None,
    ) -> None:
        self.weights = weights
        self.parts = parts
        self._stream = stream or _current_stream
        self._watched = watched or _has_hooks
        self._alike = alike
        # made by the first call, and anew where weights have moved; all records are of this memory
        self._memory: WeightMemory | None = None
        # by kind of call; None: seen once
        self._records: dict[tuple[Any, ...], Record | NotReplayable | None] = {}

    def fits(self, *parts: object) -> bool:
        """Whether the records were made with these parts."""
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))

    def reasons(self) -> tuple[str | None, ...]:
        """Of every kind of call that was looked at: None if it is recorded, else why not."""
        with _CHANGING:
            known = tuple(self._records.values())
        return tuple(str(found) if isinstance(found, NotReplayable) else None for found in known if found)

    def run(
        self, call: Callable[[Workspace], None], inputs: Sequence[Tensor | None], workspace: Workspace | None
    ) -> None:
        """Do what ``call`` does: by a record, or by calling it with the scratch memory.

        ``inputs``: the call's tensors, the result among them, always in the same order; ``workspace``: the layer's own,
        or None for scratch memory of each call's own.
        """
        scratch = workspace if workspace is not None else Workspace(self.weights.device)
        self._run(functools.partial(call, scratch), inputs, (), scratch, workspace is not None)

    def step(self, call: Callable[[], object], inputs: Sequence[Tensor | None], *kind: Hashable) -> None:
        """As :meth:`run`, of a step without scratch memory; ``kind``: what its launches depend on beside tensors."""
        self._run(call, inputs, kind, None, False)

    def _run(
        self,
        call: Callable[[], object],
        inputs: Sequence[Tensor | None],
        of: tuple[Hashable, ...],
        scratch: Workspace | None,
        lasting: bool,
    ) -> None:
        place, device = self.weights.device, None
        if place.type == "cuda":
            device = torch.cuda.current_device()
            if device != place.index:
                # what is launched goes to the current GPU
                with torch.cuda.device(place):
                    self._run(call, inputs, of, scratch, lasting)
                return
        if RECORDING.get() is not None:  # nothing is launched, and nothing is to be learnt of it
            call()
            return
        memory = self._memory
        # `TensorPlaces.unmoved` without a call of a Python function, since every call asks; before a record is looked
        # up, since one that layers share would be filled in with old addresses too
        if (
            memory is None
            or [*map(Tensor.data_ptr, memory.places.tensors), *map(Tensor.stride, memory.places.strided)]
            != memory.places.known
        ):
            memory = self._memory = WeightMemory(self.weights)
            with _CHANGING:
                self._records.clear()
        kind = (device, *of, *_kind(inputs))
        found = self._records.get(kind, _NEW)
        if found is _NEW or found is None:
            found = self._shared(kind, found, memory, scratch, lasting)
        if isinstance(found, Record) and self._started(found, kind, inputs, memory, scratch, lasting, device):
            return
        if found is None and not (place.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            launched: list[Launch] = []
            # until the record is made no other thread's call grows the scratch memory
            with contextlib.nullcontext() if scratch is None else scratch.lock:
                with observe(launched.append), _Watch() as watch:
                    call()
                made = self._record(kind, launched, watch.work, inputs, memory, scratch, lasting)
            _remember(self._records, kind, made)
            return
        call()
        if found is _NEW:
            _remember(self._records, kind, None)

    def _shared_key(self, kind: tuple[Any, ...], memory: WeightMemory) -> tuple[Any, ...] | None:
        alike = self._alike()
        return None if alike is None else (alike, memory.layout, kind)

    def _shared(
        self, kind: tuple[Any, ...], own: Any, memory: WeightMemory, scratch: Workspace | None, lasting: bool
    ) -> Any:
        """What layers that are alike know of a kind of call of which this one has no record: new, or seen (``own``)."""
        key = self._shared_key(kind, memory)
        if key is None:
            return own
        recording = _SHARED.get(key, _NEW)
        if recording is _NEW:
            _remember(_SHARED, key, None, MOST_SHARED)
            return own
        if recording is None:
            return None
        record = self._bound(recording, memory, scratch, lasting)
        if isinstance(record, NotReplayable):
            return own
        _remember(self._records, kind, record)
        return record

    def _record(
        self,
        kind: tuple[Any, ...],
        launched: Sequence[Launch],
        work: str | None,
        inputs: Sequence[Tensor | None],
        memory: WeightMemory,
        scratch: Workspace | None,
        lasting: bool,
    ) -> Record | NotReplayable:
        if work is not None:
            return NotReplayable(f"torch does a part of the work: {work}")
        spans = [*memory.spans]
        if scratch is not None:
            spans.append(Span.of(SCRATCH, scratch.hold(0)))
        spans += [Span.of(index, tensor) for index, tensor in enumerate(inputs) if tensor is not None]
        try:
            recording = Recording(launched, spans, scratch=0 if scratch is None else scratch.taken)
        except NotReplayable as reason:
            return reason
        key = self._shared_key(kind, memory)
        if key is not None:
            _remember(_SHARED, key, recording, MOST_SHARED)
        return self._bound(recording, memory, scratch, lasting)

    @staticmethod
    def _bound(
        recording: Recording, memory: WeightMemory, scratch: Workspace | None, lasting: bool
    ) -> Record | NotReplayable:
        """The recording for this layer."""
        if recording.describes_scratch and not lasting:
            return NotReplayable("a descriptor of scratch memory that belongs to one call")
        try:
            return Record(recording, memory, None if scratch is None else scratch.hold(recording.scratch))
        except NotReplayable as reason:
            return reason

    def _started(
        self,
        record: Record,
        kind: tuple[Any, ...],
        inputs: Sequence[Tensor | None],
        memory: WeightMemory,
        scratch: Workspace | None,
        lasting: bool,
        device: int | None,
    ) -> bool:
        if self._watched():
            return False
        addresses: dict[Owner, int] = {}
        for index, tensor in enumerate(inputs):
            if tensor is not None:
                addresses[index] = tensor.data_ptr()
        if scratch is None:
            return record.start(addresses, self._stream(device))
        with scratch.lock:
            start = addresses[SCRATCH] = scratch.hold(record.recording.scratch).data_ptr()
            if start % ALIGNMENT != record.recording.scratch_alignment:
                return False
            if record.fixed_scratch not in (None, start):
                moved = self._moved(record, memory, scratch, lasting)
                if moved is None:
                    return False
                _remember(self._records, kind, moved)
                record = moved
            return record.start(addresses, self._stream(device))

    def _moved(self, record: Record, memory: WeightMemory, scratch: Workspace, lasting: bool) -> Record | None:
        """``record`` for other scratch memory than that of its descriptors: it has grown, or was replaced, since."""
        found = None if record.bindings >= MOST_BINDINGS else self._bound(record.recording, memory, scratch, lasting)
        if not isinstance(found, Record):
            return None
        found.bindings = record.bindings + 1
        return found


def _remember(known: MutableMapping[Any, Any], key: Hashable, found: object, most: int = MOST_RECORDS) -> None:
    """Put ``found`` into ``known``, whose oldest entries go first; from any thread."""
    with _CHANGING:
        known.pop(key, None)
        while len(known) >= most:
            known.pop(next(iter(known)), None)
        known[key] = found


def _kind(inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What a call's launches depend on beside the layer."""
    kind: list[Any] = []
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT)
    return tuple(kind)


@functools.cache
def _driver() -> Any:
    """Triton's driver of the GPU."""
    from triton.runtime import driver

    return driver.active


@functools.cache
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def _current_stream(device: int | None) -> int:
    driver = _driver()
    stream: int = driver.get_current_stream(driver.get_current_device() if device is None else device)
    return stream


def _has_hooks() -> bool:
    runtime = _runtime_knobs()
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
