"""Replay of eager calls: record kernel launches once, start them with new addresses.

The launches of a call follow from the layer and from the shapes, strides and alignments of the call's tensors.
Determining them costs the host far more than starting them: some hundred Python calls plus Triton's dispatch of every
launch. Therefore the second call of a kind records its launches. Later calls insert the addresses of their tensors into
the record and start the compiled kernels directly. Equivalent layers, such as those of one model, share recordings: a
kind counts as seen once any of them was called with it, and each layer fills in the addresses of its own weights.

A record is used only if it is certain to match what the call would have launched:

- The experts and the prepare/finalize declare that their only device work is kernel launches through
  :func:`moe_core.kernels.launch.launch.launch` (``recordable``). If torch does any other work while a call is
  recorded (a copy, a fill), calls of that kind run as usual.
- Every address in a launch must be within a tensor of the call, the layer's weights or the workspace, whose positions
  are known. If an address belongs to none or to two of them, calls of that kind run as usual.
- The weights must be stored where they were when the record was made. Every call checks this before it looks up a
  record. If an engine has freed and reallocated their memory, all records of the layer are rebuilt.
- TMA descriptors contain absolute addresses. Those of weights stay valid; those of the workspace stay valid as long
  as the caller's workspace does.

Nothing is recorded under CUDA-graph capture, but existing records may be used during capture.

A call is recorded as a whole. If tokens cross ranks, that is what follows the exchange of numbers and tokens
(:meth:`moe_core.FusedMoEPrepareAndFinalizeModular.reserve`). In calls of separate steps each step is recorded.
"""

from __future__ import annotations

import contextlib
import functools
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
    WeightMemory,
    range_of,
)
from moe_core.spec.workspace import Workspace

#: largest number of kinds of calls per layer; the oldest are evicted first
MOST_RECORDS = 128

#: largest number of kinds of calls in the shared table, over all models
MOST_SHARED = 1024

#: limit on rebinding a record to another workspace: engines may alternate between buffers
MOST_BINDINGS = 16

#: marks a kind of call that was not seen yet
_NEW: Any = object()
#: shared recordings by layer equivalence key, layout of the weights and kind of call; None: seen once
_SHARED: dict[tuple[Any, ...], Recording | None] = {}
#: guards writes to and iteration over the tables; the lookup of a kind in every call needs no lock
_CHANGING = threading.Lock()


class _Watch(TorchFunctionMode):
    """Note the last torch function that does device work, beyond metadata, views and allocation.

    Every function that is not known to be one of these counts as work.
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
    #: functions that return a view if layout and arguments allow it, else a copy
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
    """Records of one layer's calls, or of the steps of its calls.

    Args:
        weights: Tensors whose memory persists.
        alike: Returns a key that is equal for layers that may share recordings: everything that determines the launches
            except a call's tensors and the addresses of the weights. None shares nothing.
    """

    def __init__(self, weights: Lasting, alike: Callable[[], Hashable | None] = lambda: None) -> None:
        self.weights = weights
        self._alike = alike
        # created by the first call and recreated when weights have moved; all records refer to it
        self._memory: WeightMemory | None = None
        #: records by kind of call
        self._records: dict[tuple[Any, ...], Record | NotReplayable] = {}
        #: like `_SHARED`, if recordings are not shared
        self._recordings: dict[tuple[Any, ...], Recording | None] = {}

    def reasons(self) -> tuple[str | None, ...]:
        """Return, for every known kind of call, None if it is recorded, else the reason why not."""
        with _CHANGING:
            known = tuple(self._records.values())
        return tuple(str(found) if isinstance(found, NotReplayable) else None for found in known)

    def run(
        self,
        call: Callable[[Workspace], None],
        inputs: Sequence[Tensor | None],
        workspace: Workspace | None,
        *kind: Hashable,
        step: Callable[[], None] | None = None,
    ) -> None:
        """Execute ``call``: by replaying a record, or by calling it with the workspace.

        Args:
            call: Runs the layer with a workspace.
            inputs: The call's tensors, including the output, always in the same order.
            workspace: The layer's workspace, or None for a separate workspace per call.
            *kind: Values that determine the launches in addition to the tensors.
            step: What the call passes to :func:`moe_core.kernels.launch.launch.host_step`, if it does so, once.
        """
        scratch = workspace if workspace is not None else Workspace(self.weights.device)
        self._run(functools.partial(call, scratch), inputs, kind, scratch, workspace is not None, step)

    def step(self, call: Callable[[], object], inputs: Sequence[Tensor | None], *kind: Hashable) -> None:
        """Execute a step without a workspace, like :meth:`run`.

        Args:
            call: Runs the step.
            inputs: The step's tensors, including the outputs, always in the same order.
            *kind: Values that determine the launches in addition to the tensors.
        """
        self._run(call, inputs, kind, None, False)

    def _run(
        self,
        call: Callable[[], object],
        inputs: Sequence[Tensor | None],
        of: tuple[Hashable, ...],
        scratch: Workspace | None,
        lasting: bool,
        step: Callable[[], None] | None = None,
    ) -> None:
        place, device = self.weights.device, None
        if place.type == "cuda":
            device = torch.cuda.current_device()
            if device != place.index:
                # launches go to the current GPU
                with torch.cuda.device(place):
                    self._run(call, inputs, of, scratch, lasting, step)
                return
        if RECORDING.get() is not None:  # nothing runs, so there is nothing to replay
            call()
            return
        memory = self._memory
        # before the lookup of a record, because a shared recording would otherwise be bound to stale addresses
        if memory is None or not memory.places.unmoved():
            memory = self._memory = WeightMemory(self.weights)
            with _CHANGING:
                self._records.clear()
        kind = (device, *of, *_kind(inputs))
        found = self._records.get(kind)
        if found is None:
            alike = self._alike()
            known, most = (self._recordings, MOST_RECORDS) if alike is None else (_SHARED, MOST_SHARED)
            key = (alike, memory.layout, kind)
            recording = known.get(key, _NEW)
            captured = device is not None and torch.cuda.is_current_stream_capturing()
            if recording is _NEW or (recording is None and captured):
                call()
                _remember(known, key, None, most)
                return
            if recording is None:
                # the lock keeps other threads from growing the workspace until the record is made
                with contextlib.nullcontext() if scratch is None else scratch.lock:
                    try:
                        recording = _recorded(call, inputs, scratch, memory)
                    except NotReplayable as reason:
                        _remember(self._records, kind, reason.with_traceback(None))
                        return
                    _remember(known, key, recording, most)
                    _remember(self._records, kind, _bound(recording, memory, scratch, lasting))
                return
            found = _bound(recording, memory, scratch, lasting)
            _remember(self._records, kind, found)
        if isinstance(found, NotReplayable) or not self._started(found, inputs, scratch, lasting, memory, kind, step):
            call()

    def _started(
        self,
        record: Record,
        inputs: Sequence[Tensor | None],
        scratch: Workspace | None,
        lasting: bool,
        memory: WeightMemory,
        kind: tuple[Any, ...],
        step: Callable[[], None] | None,
    ) -> bool:
        """Start the launches of a record; False, without any launch, if the call must be dispatched."""
        if _has_hooks():
            return False
        addresses: dict[Owner, int] = {}
        for index, tensor in enumerate(inputs):
            if tensor is not None:
                addresses[index] = tensor.data_ptr()
        device = kind[0]
        if scratch is None:
            return record.start(addresses, _current_stream(device), step)
        with scratch.lock:
            start = addresses[SCRATCH] = scratch.hold(record.recording.scratch).data_ptr()
            if start % ALIGNMENT != record.recording.scratch_alignment:
                return False
            if record.fixed_scratch not in (None, start):
                # the workspace was resized or replaced, and TMA descriptors contain its previous address
                if record.bindings >= MOST_BINDINGS:
                    return False
                moved = _bound(record.recording, memory, scratch, lasting, record.bindings + 1)
                if isinstance(moved, NotReplayable):
                    return False
                _remember(self._records, kind, moved)
                record = moved
            return record.start(addresses, _current_stream(device), step)


def _recorded(
    call: Callable[[], object], inputs: Sequence[Tensor | None], scratch: Workspace | None, memory: WeightMemory
) -> Recording:
    """Make a call and record its launches."""
    launched: list[Launch] = []
    with observe(launched.append), _Watch() as watch:
        call()
    if watch.work is not None:
        raise NotReplayable(f"torch does a part of the work: {watch.work}")
    ranges = [*memory.ranges]
    if scratch is not None:
        ranges.append((SCRATCH, *range_of(scratch.hold(0))))
    ranges += [(index, *range_of(tensor)) for index, tensor in enumerate(inputs) if tensor is not None]
    return Recording(launched, ranges, scratch=0 if scratch is None else scratch.taken)


def _bound(
    recording: Recording, memory: WeightMemory, scratch: Workspace | None, lasting: bool, bindings: int = 0
) -> Record | NotReplayable:
    """Bind a recording to a layer, or return why that is impossible."""
    if recording.describes_scratch and not lasting:
        return NotReplayable("a descriptor of scratch memory that belongs to one call")
    try:
        return Record(recording, memory, None if scratch is None else scratch.hold(recording.scratch), bindings)
    except NotReplayable as reason:
        return reason.with_traceback(None)


def _remember(known: MutableMapping[Any, Any], key: Hashable, found: object, most: int = MOST_RECORDS) -> None:
    """Put ``found`` into ``known`` and evict the oldest entries; thread-safe."""
    with _CHANGING:
        known.pop(key, None)
        while len(known) >= most:
            known.pop(next(iter(known)), None)
        known[key] = found


def _kind(inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Return the properties of a call's tensors that determine its launches."""
    kind: list[Any] = []
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT)
    return tuple(kind)


@functools.cache
def _driver() -> Any:
    """Return Triton's active GPU driver."""
    from triton.runtime import driver

    return driver.active


@functools.cache
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime


def _current_stream(device: int) -> int:
    stream: int = _driver().get_current_stream(device)
    return stream


def _has_hooks() -> bool:
    runtime = _runtime_knobs()
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
