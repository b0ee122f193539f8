"""Eager calls that repeat: their kernel launches are recorded once and started again with new addresses.

The launches of a call follow from the layer and from the shapes, strides and alignments of the call's tensors.  Finding
them costs the host far more than starting them: it is some hundred Python calls and Triton's dispatch of every launch.
So the second call of a kind records its launches, and later ones put the addresses of their own tensors into the
record and start the compiled kernels directly.

A record is only used where it is certain to be what the call would have launched:

- The experts and the prepare/finalize say that they do nothing on the device but launch kernels through
  :func:`moe_core.jit.launch.launch` (``launches_only``).  Any other work that torch sees while a call is recorded
  (a copy, a fill) makes calls of that kind run as usual.
- Every address in a launch lies within a tensor of the call, the layer's weights or the scratch memory, whose places
  are known.  An address from anywhere else, or from two of them, likewise.
- Descriptors for the tensor memory accelerator hold addresses of their own: those of weights stay, those of scratch
  memory stay as long as the caller's workspace does.

Nothing is recorded under CUDA-graph capture; a record may be used while a graph is captured.

A layer on one rank is recorded as a whole.  Where tokens cross ranks each step is recorded by itself, since ranks call
each other between them.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_core.jit.launch import Launch, observe
from moe_core.workspace import Workspace

#: kinds of calls that a layer remembers; the oldest go first
MOST_RECORDS = 128

#: kernels are compiled for addresses that are multiples of so many bytes, or for any
_ALIGNMENT = 16

#: what an address may belong to beside the call's tensors
_WORKSPACE = "workspace"
#: a kind of call that was not seen yet
_NEW: Any = object()


class Lasting(Protocol):
    """Tensors whose memory stays: the weights of a layer, say."""

    @property
    def device(self) -> torch.device: ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Span:
    """Bytes from ``start`` to ``end`` of the memory that ``owner`` names; ``owner`` None: it stays where it is."""

    owner: int | str | None
    start: int
    end: int

    @staticmethod
    def of(owner: int | str | None, tensor: Tensor) -> Span:
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return Span(owner, start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


class NotReplayable(Exception):  # noqa: N818 - an answer, no error
    """A launch depends on something that the record cannot follow."""


class Record:
    """The launches of one kind of call.

    ``launched``: what a call started; ``spans``: the memory that its addresses may lie in; ``scratch``: bytes of
    scratch memory.  Raises NotReplayable.
    """

    def __init__(self, launched: Sequence[Launch], spans: Sequence[Span], *, scratch: int) -> None:
        self.scratch = scratch
        self.scratch_alignment = next((span.start for span in spans if span.owner == _WORKSPACE), 0) % _ALIGNMENT
        #: the scratch memory's address, where a descriptor holds it
        self.fixed_scratch: int | None = None
        self._spans = spans
        #: (where an address stands: a list and a place in it; whose memory it is in, how far from its start)
        self._addresses: list[tuple[list[Any], int, int | str, int]] = []
        #: tuples that hold addresses: where one stands, and its items; inner ones first
        self._tuples: list[tuple[list[Any], int, list[Any]]] = []
        self._launches = [self._prepared(one) for one in launched]
        self._lock = threading.Lock()

    def start(self, addresses: Mapping[int | str, int], stream: int) -> bool:
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

    def _prepared(self, one: Launch) -> tuple[Any, ...]:
        compiled = one.compiled
        if not (hasattr(compiled, "run") and hasattr(compiled, "function") and hasattr(compiled, "packed_metadata")):
            raise NotReplayable(f"{one.name} was not compiled")  # Triton's interpreter
        grid = (*one.grid, 1, 1)[:3]
        arguments = list(one.arguments.values())
        self._bind(arguments)
        return compiled.run, grid, compiled.function, compiled.packed_metadata, arguments

    def _bind(self, arguments: list[Any]) -> bool:
        """Note where addresses stand in ``arguments``, and put in those that stay; True if some do not."""
        changes = False
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor):
                owner, offset = self._owner(value)
                arguments[place] = value.data_ptr()
                if owner is not None:
                    self._addresses.append((arguments, place, owner, offset))
                    changes = True
            elif isinstance(value, tuple):
                items = list(value)
                if self._bind(items):
                    self._tuples.append((arguments, place, items))
                    changes = True
                arguments[place] = tuple(items)
            elif isinstance(getattr(value, "base", None), Tensor):  # a descriptor
                owner, _ = self._owner(value.base)
                if owner == _WORKSPACE:
                    self.fixed_scratch = next(span.start for span in self._spans if span.owner == _WORKSPACE)
                elif owner is not None:
                    raise NotReplayable("a descriptor of one of the call's tensors")
        return changes

    def _owner(self, tensor: Tensor) -> tuple[int | str | None, int]:
        """(whose memory the tensor lies in, how far from its start)."""
        if not tensor.numel():
            return None, 0
        inner = Span.of(None, tensor)
        around = [span for span in self._spans if span.start <= inner.start and inner.end <= span.end]
        if len({span.owner for span in around}) != 1:
            raise NotReplayable(f"memory of {len(around)} owners")
        return around[0].owner, inner.start - around[0].start


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
    _MEMORY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
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
    memory stays; ``stream``: the current stream of the device with this number (None: of the current device), as
    Triton's launcher takes it; ``watched``: whether a profiler wants to see launches as Triton makes them.
    """

    def __init__(
        self,
        weights: Lasting,
        parts: tuple[object, ...] = (),
        *,
        stream: Callable[[int | None], int] | None = None,
        watched: Callable[[], bool] | None = None,
    ) -> None:
        self.weights = weights
        self.parts = parts
        self._stream = stream or _current_stream
        self._watched = watched or _has_hooks
        # by kind of call; None: seen once
        self._records: dict[tuple[Any, ...], Record | NotReplayable | None] = {}

    def fits(self, *parts: object) -> bool:
        """Whether the records were made with these parts."""
        return len(parts) == len(self.parts) and all(map(operator.is_, parts, self.parts))

    def reasons(self) -> tuple[str | None, ...]:
        """Of every kind of call that was looked at: None if it is recorded, else why not."""
        return tuple(
            str(found) if isinstance(found, NotReplayable) else None for found in self._records.values() if found
        )

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
        device = torch.cuda.current_device() if self.weights.device.type == "cuda" else None
        kind = (device, *of, *_kind(inputs))
        found = self._records.get(kind, _NEW)
        if isinstance(found, Record) and self._started(found, inputs, scratch, device):
            return
        if found is None and not (self.weights.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            launched: list[Launch] = []
            with observe(launched.append), _Watch() as watch:
                call()
            self._remember(kind, self._record(launched, watch.work, inputs, scratch, lasting))
            return
        call()
        if found is _NEW:
            self._remember(kind, None)

    def _record(
        self,
        launched: Sequence[Launch],
        work: str | None,
        inputs: Sequence[Tensor | None],
        scratch: Workspace | None,
        lasting: bool,
    ) -> Record | NotReplayable:
        if work is not None:
            return NotReplayable(f"torch does a part of the work: {work}")
        spans = [*self._weight_spans()]
        if scratch is not None:
            spans.append(Span.of(_WORKSPACE, scratch.hold(0)))
        spans += [Span.of(index, tensor) for index, tensor in enumerate(inputs) if tensor is not None]
        try:
            record = Record(launched, spans, scratch=0 if scratch is None else scratch.taken)
        except NotReplayable as reason:
            return reason
        if record.fixed_scratch is not None and not lasting:
            return NotReplayable("a descriptor of scratch memory that belongs to one call")
        return record

    def _started(
        self, record: Record, inputs: Sequence[Tensor | None], scratch: Workspace | None, device: int | None
    ) -> bool:
        if self._watched():
            return False
        addresses: dict[int | str, int] = {}
        if scratch is not None:
            start = scratch.hold(record.scratch).data_ptr()
            if start % _ALIGNMENT != record.scratch_alignment or record.fixed_scratch not in (None, start):
                return False
            addresses[_WORKSPACE] = start
        for index, tensor in enumerate(inputs):
            if tensor is not None:
                addresses[index] = tensor.data_ptr()
        return record.start(addresses, self._stream(device))

    def _remember(self, kind: tuple[Any, ...], record: Record | NotReplayable | None) -> None:
        self._records.pop(kind, None)
        while len(self._records) >= MOST_RECORDS:
            self._records.pop(next(iter(self._records)), None)
        self._records[kind] = record

    def _weight_spans(self) -> Iterator[Span]:
        """Memory of the weights, each piece once."""
        storages = (tensor.untyped_storage() for _, tensor in self.weights.tensors())
        for start, size in {storage.data_ptr(): storage.nbytes() for storage in storages}.items():
            yield Span(None, start, start + size)


def _kind(inputs: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What a call's launches depend on beside the layer."""
    kind: list[Any] = []
    for tensor in inputs:
        if tensor is None:
            kind.append(None)
        else:
            kind += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % _ALIGNMENT)
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
